// The search of the report: a word's codes, its neighbours, and the words that share most codes.
// Everything comes from the page itself. Symbols reach it as text only, never as markup.
"use strict";

(() => {
  const data = JSON.parse(document.getElementById("search-data").textContent);
  const field = document.getElementById("word");
  const list = document.getElementById("suggestions");
  const results = document.getElementById("results");
  const choice = document.getElementById("table");
  const SUGGESTIONS = 8;

  // -- data ----------------------------------------------------------------------------------

  function bytes(text) {
    const binary = atob(text);
    const out = new Uint8Array(binary.length);
    for (let i = 0; i < out.length; i++) out[i] = binary.charCodeAt(i);
    return out;
  }

  const plain = (symbol) => symbol.replace(/^[▁Ġ]+/, "").toLowerCase();

  for (const words of data.vocabularies) {
    words.symbol = (row) => (words.symbols ? words.symbols[row] : "#" + row);
    words.plain = words.symbols ? words.symbols.map(plain) : null;
    words.row = new Map();
    (words.symbols || []).forEach((symbol, row) => {
      if (!words.row.has(symbol)) words.row.set(symbol, row);
    });
    words.find = (text) => {
      if (words.symbols) return words.row.has(text) ? words.row.get(text) : -1;
      const row = /^#?\d{1,9}$/.test(text) ? Number(text.replace("#", "")) : -1;
      return row < words.rows ? row : -1;
    };
  }

  // Codes follow each other in a row without gaps, lowest bit first; a row has whole bytes. Here
  // the codes of a group come together, all rows after each other: loops over rows are fast.
  function unpack(model) {
    const packed = bytes(model.codes);
    const D = model.bits.length;
    const width = Math.max(1, Math.ceil(model.bits.reduce((a, b) => a + b, 0) / 8));
    const wide = Math.max(...model.sizes) > 256;
    const groups = [];
    for (let j = 0, start = 0; j < D; start += model.bits[j++]) {
      const codes = new (wide ? Uint16Array : Uint8Array)(model.rows);
      const shift = start & 7, mask = (1 << model.bits[j]) - 1;
      for (let row = 0, at = start >> 3; row < model.rows; row++, at += width) {
        const word = packed[at] | (packed[at + 1] << 8) | (packed[at + 2] << 16);
        codes[row] = (word >> shift) & mask;
      }
      groups.push(codes);
    }
    return groups;
  }

  function prepare(model) {
    if (model.ready) return;
    model.ready = true;
    if (model.codes) {
      model.D = model.bits.length;
      model.code = unpack(model);
    }
    if (model.values) {
      const raw = bytes(model.values);
      model.value = new Float32Array(raw.buffer);
      model.offset = [];
      model.sizes.reduce((at, size, j) => ((model.offset[j] = model.shared ? 0 : at), at + size), 0);
      model.norm = new Float64Array(model.rows);
      for (let j = 0; j < model.D; j++) add(model.norm, products(model, j, -1), model.code[j]);
      for (let row = 0; row < model.rows; row++) model.norm[row] = Math.sqrt(model.norm[row]);
    }
    if (model.neighbours) {
      model.ids = new Int32Array(bytes(model.neighbours.ids).buffer);
      model.cosines = new Int16Array(bytes(model.neighbours.cosines).buffer);
    }
  }

  // Inner products of one code's value with all values of its group, or of each with itself.
  function products(model, j, code) {
    const { value, width } = model;
    const out = new Float64Array(model.sizes[j]);
    for (let k = 0; k < out.length; k++) {
      const a = (model.offset[j] + k) * width;
      const b = code < 0 ? a : (model.offset[j] + code) * width;
      let sum = 0;
      for (let i = 0; i < width; i++) sum += value[a + i] * value[b + i];
      out[k] = sum;
    }
    return out;
  }

  // -- search --------------------------------------------------------------------------------

  // Each row's code picks a number of the table, which is added to the row's sum.
  function add(sums, table, codes) {
    for (let row = 0; row < sums.length; row++) sums[row] += table[codes[row]];
  }

  // The k best rows by score; of equal ones those that come first.
  function best(scores, k) {
    const found = [];
    let least = -Infinity;
    for (let row = 0; row < scores.length; row++) {
      const value = scores[row];
      if (value <= least) continue;
      let at = found.length;
      while (at > 0 && found[at - 1].value < value) at--;
      found.splice(at, 0, { row, value });
      if (found.length > k) found.pop();
      if (found.length === k) least = found[k - 1].value;
    }
    return found.filter((entry) => entry.value > -Infinity);
  }

  function neighbours(model, row) {
    if (row === model.padding) return [];
    if (model.values) {
      const { D, code, norm } = model;
      const scores = new Float64Array(model.rows);
      for (let j = 0; j < D; j++) add(scores, products(model, j, code[j][row]), code[j]);
      for (let other = 0; other < scores.length; other++) {
        const lengths = Math.max(norm[row] * norm[other], 1e-24);
        scores[other] = Math.round((1e6 * scores[other]) / lengths) / 1e6;
      }
      return best(without(scores, model, row), data.k);
    }
    if (!model.neighbours || row >= model.neighbours.rows) return null;
    const found = [];
    for (let i = row * data.k; i < (row + 1) * data.k; i++) {
      if (model.ids[i] >= 0) found.push({ row: model.ids[i], value: model.cosines[i] / 32767 });
    }
    return found;
  }

  function sharing(model, row) {
    const scores = new Float64Array(model.rows);
    for (let j = 0; j < model.D; j++) {
      const same = new Float64Array(model.sizes[j]);
      same[model.code[j][row]] = 1;
      add(scores, same, model.code[j]);
    }
    return best(without(scores, model, row), data.k).filter((entry) => entry.value > 0);
  }

  // A word is not its own neighbour, and padding is nobody's.
  function without(scores, model, row) {
    scores[row] = -Infinity;
    if (model.padding !== null && model.padding < scores.length) scores[model.padding] = -Infinity;
    return scores;
  }

  function suggest(text, words) {
    const wanted = plain(text);
    const ranked = [[], [], []]; // the word itself, its beginning, a part of it
    if (!text) return [];
    if (!words.plain) return words.find(text) < 0 ? [] : [words.find(text)];
    const exact = words.find(text);
    if (exact >= 0) ranked[0].push(exact);
    for (let row = 0; row < words.plain.length; row++) {
      const found = wanted ? words.plain[row].indexOf(wanted) : -1;
      if (found < 0 || row === exact) continue;
      const rank = words.plain[row].length === wanted.length ? 0 : found === 0 ? 1 : 2;
      if (ranked[rank].length < SUGGESTIONS) ranked[rank].push(row);
    }
    return ranked.flat().slice(0, SUGGESTIONS);
  }

  // -- page ----------------------------------------------------------------------------------

  function make(tag, text, className) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return element;
  }

  function near(found, words, show, share, also) {
    const box = make("ol", undefined, "near");
    for (const entry of found) {
      const line = make("li");
      const symbol = words.symbol(entry.row);
      const name = make("bdi", symbol, also && also.has(symbol) ? "also" : "");
      line.style.setProperty("--share", Math.max(0, Math.min(1, share(entry.value))));
      line.append(name, make("span", show(entry.value)));
      box.append(line);
    }
    return box;
  }

  function card(model, row, reference) {
    const words = data.vocabularies[model.vocabulary];
    const box = make("div", undefined, "card");
    box.append(make("h3", model.name), make("div", `row ${row}`, "muted"));
    if (model.code) {
      const codes = make("div", undefined, "codes");
      codes.style.setProperty("--columns", Math.min(model.D, 8)); // rows of equal length
      for (let j = 0; j < model.D; j++) {
        const code = model.code[j][row];
        const cell = make("i", String(code));
        cell.title = `group ${j}, code ${code} of ${model.sizes[j]}`;
        cell.style.setProperty("--hue", Math.round((360 * code) / model.sizes[j]));
        codes.append(cell);
      }
      box.append(make("h4", "Codes"), codes);
    }
    if (row === model.padding) {
      box.append(make("p", "padding: a row of zeros", "muted"));
      return box;
    }
    const found = neighbours(model, row);
    box.append(make("h4", "Nearest neighbours, cosine"));
    if (found === null) {
      const count = model.neighbours ? model.neighbours.rows : 0;
      const text = `worked out for the first ${count.toLocaleString("en")} symbols only`;
      box.append(make("p", text, "muted"));
    } else {
      const also = reference && reference.name !== model.name ? reference.symbols : null;
      box.append(near(found, words, (value) => value.toFixed(3), (value) => value, also));
    }
    if (model.code) {
      const same = sharing(model, row);
      box.append(make("h4", `Words that share most codes, of ${model.D}`));
      box.append(near(same, words, String, (value) => value / model.D, null));
    }
    return box;
  }

  function show(text) {
    const table = data.tables[choice ? choice.selectedIndex : 0];
    results.replaceChildren();
    if (!table || !text) return;
    table.models.forEach(prepare);
    const start = performance.now();
    const cards = make("div", undefined, "cards");
    const hits = table.models.map((model) => data.vocabularies[model.vocabulary].find(text));
    let reference = null;
    table.models.forEach((model, at) => {
      if (model.name !== data.reference || hits[at] < 0) return;
      const words = data.vocabularies[model.vocabulary];
      const found = neighbours(model, hits[at]) || [];
      reference = { name: model.name, symbols: new Set(found.map((e) => words.symbol(e.row))) };
    });
    table.models.forEach((model, at) => {
      if (hits[at] >= 0) cards.append(card(model, hits[at], reference));
    });
    const head = make("p", "", "muted");
    const milliseconds = performance.now() - start;
    results.dataset.milliseconds = milliseconds.toFixed(2);
    results.dataset.word = text;
    head.append(make("bdi", text, "word"));
    const others = reference && cards.childElementCount > 1;
    const dot = others ? `; ● also a neighbour in ${reference.name}` : "";
    head.append(make("span", ` found in ${milliseconds.toFixed(1)} ms${dot}`));
    results.append(head, cards);
  }

  // -- input ---------------------------------------------------------------------------------

  let offered = [];
  let marked = -1;

  const allWords = () => {
    const table = data.tables[choice ? choice.selectedIndex : 0];
    return [...new Set(table.models.map((model) => data.vocabularies[model.vocabulary]))];
  };

  function mark(at) {
    marked = at;
    [...list.children].forEach((item, i) => item.setAttribute("aria-selected", i === at));
    if (at >= 0) field.setAttribute("aria-activedescendant", `suggestion-${at}`);
    else field.removeAttribute("aria-activedescendant");
  }

  function typed() {
    const text = field.value.trim();
    const found = allWords().flatMap((words) => suggest(text, words).map((r) => words.symbol(r)));
    offered = [...new Set(found)].slice(0, SUGGESTIONS);
    list.replaceChildren();
    offered.forEach((symbol, at) => {
      const item = make("li");
      item.id = `suggestion-${at}`;
      item.setAttribute("role", "option");
      item.append(make("bdi", symbol));
      item.addEventListener("mousedown", (event) => (event.preventDefault(), choose(symbol)));
      list.append(item);
    });
    mark(-1);
    open(offered.length > 0 && !(offered.length === 1 && offered[0] === text));
    if (offered.length) show(offered[0]);
    else {
      results.replaceChildren();
      if (text) results.append(make("p", "no such symbol", "muted"));
    }
  }

  function open(yes) {
    list.hidden = !yes;
    field.setAttribute("aria-expanded", String(yes));
  }

  function choose(symbol) {
    field.value = symbol;
    open(false);
    show(symbol);
    history.replaceState(null, "", "#word=" + encodeURIComponent(symbol));
  }

  function fromAddress() {
    if (!location.hash.startsWith("#word=")) return;
    let symbol = location.hash.slice(6);
    try {
      symbol = decodeURIComponent(symbol);
    } catch (error) {
      return; // not an address of this page
    }
    field.value = symbol;
    open(false);
    show(symbol);
    document.getElementById("search").scrollIntoView();
  }

  field.addEventListener("input", typed);
  field.addEventListener("keydown", (event) => {
    const down = event.key === "ArrowDown", up = event.key === "ArrowUp";
    if ((down || up) && offered.length) {
      event.preventDefault();
      open(true);
      mark((marked + (down ? 1 : offered.length - (marked < 0 ? 0 : 1))) % offered.length);
    } else if (event.key === "Enter" && offered.length) choose(offered[Math.max(marked, 0)]);
    else if (event.key === "Escape") open(false);
  });
  field.addEventListener("blur", () => open(false));
  if (choice) choice.addEventListener("change", () => show(field.value.trim()));
  window.addEventListener("hashchange", fromAddress);
  fromAddress();
  const example = document.querySelector(".chips bdi");
  if (!results.firstChild && example) show(example.textContent);
  // Codes are unpacked before anyone types, once the page is there.
  setTimeout(() => data.tables.forEach((table) => table.models.forEach(prepare)), 0);
})();
