# shellcheck shell=sh disable=SC2034,SC2154 # variables are shared with the script that sources it
# Sourced by train.sh: what an update sees is the same with any number of workers.

# Sets batch_flags, and batch_line, the sum that is shown, from the recipe, BATCH, MICRO and $workers.
split_batch() {
    batch=${BATCH:-$batch} batch_line=''
    number BATCH "$batch"
    if [ -z "$micro" ]; then
        share_batch
        return
    fi
    micro=${MICRO:-$micro}
    number MICRO "$micro"
    [ $((batch % workers)) -eq 0 ] ||
        fail "$counted do not divide BATCH $batch ($unit); take another number (WORKERS)," \
            "or set BATCH to a multiple of $workers"
    share=$((batch / workers))
    freq=$(((share + micro - 1) / micro))
    while [ $((share % freq)) -ne 0 ]; do freq=$((freq + 1)); done
    most=$micro micro=$((share / freq))
    if [ $freq -gt 1 ] && [ $((2 * micro)) -lt "$most" ]; then
        round=$((most * workers))
        fail "BATCH $batch over $workers worker(s) does not split into equal parts near MICRO $most" \
            "($unit); take another BATCH, e.g. $(((batch + round - 1) / round * round))"
    fi
    if [ "$unit" = tokens ]; then
        [ $micro -ge "$floor" ] ||
            fail "$micro $unit for a worker at once do not hold the longest pair; at least $floor:" \
                "fewer workers, or a larger BATCH"
        batch_flags="--max-tokens $micro --update-freq $freq"
    else
        # Long sentences are put into smaller batches, to bound memory.
        tokens=$((length * micro))
        [ $tokens -ge "$floor" ] || tokens=$floor
        batch_flags="--batch-size $micro --max-tokens $tokens --update-freq $freq"
    fi
    batch_line="$batch $unit an update = $workers worker(s) x $micro x $freq"
}

# Lanes and blocks: each worker takes its part in one step.
share_batch() {
    if [ $((batch % workers)) -ne 0 ]; then
        divisors='' n=1
        while [ $n -le "$batch" ]; do
            [ $((batch % n)) -ne 0 ] || divisors="$divisors $n"
            n=$((n + 1))
        done
        # shellcheck disable=SC2086 # numbers are words
        fail "$counted do not divide $batch $unit; set WORKERS to $(one_of $divisors)"
    fi
    batch_flags="--batch-size $((batch / workers))"
}
