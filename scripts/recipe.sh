# shellcheck shell=sh disable=SC2034,SC2154 # variables are shared with the script that sources it
# Sourced by train.sh and score.sh, after python.sh and launch.sh: reads recipes/NAME.conf.
# A recipe is a list of shell variables; CONTRIBUTING.md explains how to add one.
#   data             data set: data-bin/$data, made by scripts/prepare.sh $data
#   needs            file in the data folder that shows that the data is there
#   unit batch       what an update sees: lanes, blocks, documents, sentences or tokens, how many
#   micro            what a worker takes at once at most; --update-freq makes up the rest.
#                    Without it the workers share the batch and nothing is accumulated.
#   length floor     sentences: --max-tokens is length x micro, at least floor; tokens: the smallest
#                    micro that holds the longest pair
#   flags            of fairseq-train; @method and @batch stand for the flags of these two
#   methods          a line for each METHOD: its name, its flags. Flags after `...` come behind all
#                    others. METHOD full has no flags.
#   metric score     how score.sh evaluates (bleu, perplexity, validate or squad), and its flags
#   subset           the split that score.sh takes unless told otherwise (default: test)
#   scored           validate: file in the data folder that a split has, @subset stands for the split
#   pretrained       the checkpoint that training starts from, and
#   pretraining      the recipe that makes it
#   source target    bleu: the languages
#   reference        bleu: reference file in the data folder, @subset stands for the split;
#   tokenized        bleu: the tokenised reference, if a second score is wanted
# $method is set while a recipe is read. Files that recipes share are called NAME.part.
recipes=$root/recipes

one_of() { # WORDS...: "a, b or c"
    list=$1
    shift
    while [ $# -gt 1 ]; do
        list="$list, $1"
        shift
    done
    echo "$list${1:+ or $1}"
}

recipe_names() {
    for file in "$recipes"/*.conf; do basename "$file" .conf; done
}

need_checkpoint() { # VARIABLE FILE HOW: a file that torch.save may have written
    [ -f "$2" ] || fail "no file $1 '$2'; run: $3"
    case $(head -c 1 "$2" | od -An -tu1 | tr -d ' ') in
    80 | 128) ;; # a zip file, or a pickle of old
    *) fail "$1 '$2' is not a PyTorch checkpoint" ;;
    esac
}

read_recipe() { # NAME METHOD
    recipe=$1 method=$2
    case $recipe in
    '' | *[!A-Za-z0-9_-]*) known='' ;;
    *) known=$recipes/$recipe.conf ;;
    esac
    # shellcheck disable=SC2046 # names are words
    [ -f "$known" ] || fail "RECIPE '$recipe' is unknown; choose $(one_of $(recipe_names))"
    data='' needs='' unit='' batch='' micro='' length='' floor=0 flags='' methods=''
    metric='' score='' subset=test scored='' pretrained='' pretraining=''
    source='' target='' reference='' tokenized=''
    # shellcheck disable=SC1090 # whichever it is
    . "$known"
}

# Sets method_flags and last_flags for $method.
find_method() {
    method_flags='' last_flags='' names=full
    while read -r name row; do
        [ -n "$name" ] || continue
        names="$names $name"
        [ "$name" = "$method" ] || continue
        method_flags=${row%%...*}
        [ "$method_flags" = "$row" ] || last_flags=${row#*...}
    done <<END
$methods
END
    # shellcheck disable=SC2086 # names are words
    case " $names " in
    *" $method "*) ;;
    *) fail "METHOD '$method' is unknown to recipe $recipe; choose $(one_of $names)" ;;
    esac
}
