# shellcheck shell=sh disable=SC2034,SC2154 # variables are shared with the script that sources it
# Sourced by the scripts that call fairseq, after python.sh: errors, the number of workers, the
# command that is shown.
script=$(basename "$0")

# glibc returns freed blocks to the kernel and maps their pages again at every step; keeping them makes
# a training step on a CPU faster. Blocks above 32 MB, glibc's own limit, stay outside of the heap, where
# the place of a freed aligned block may not be used again and memory can grow at every step
# (https://sourceware.org/bugzilla/show_bug.cgi?id=14581).
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-33554432}"
export MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-4000000000}"

fail() {
    echo "$script: $*" >&2
    exit 2
}

number() { # NAME VALUE
    case $2 in
    '' | *[!0-9]* | 0*) fail "$1 '$2' is not a positive number" ;;
    esac
}

# FLAGS...: sets workers, how many processes train; counted, where the number comes from; and
# start_flags, what fairseq must be told so that it starts as many.
count_workers() {
    world='' cpu='' previous='' start_flags=''
    for word in "$@"; do
        case $word in
        --cpu) cpu=1 ;;
        --distributed-world-size=*) world=${word#*=} ;;
        esac
        if [ "$previous" = --distributed-world-size ]; then world=$word; fi
        previous=$word
    done
    # A launcher that starts a different number than the batch was computed for would change the
    # training.
    launched=${WORLD_SIZE:-$world}
    workers=${WORKERS:-$launched}
    counted="$workers workers"
    if [ -n "${WORKERS:-}" ] && [ -n "$launched" ] && [ "$WORKERS" != "$launched" ]; then
        fail "WORKERS $WORKERS, but $launched are started (WORLD_SIZE or --distributed-world-size);" \
            "leave WORKERS out"
    fi
    if [ -z "$workers" ] && [ "${SLURM_STEP_NUM_TASKS:-1}" -gt 1 ]; then
        fail "srun started $SLURM_STEP_NUM_TASKS tasks; add for one worker per task:" \
            "--distributed-world-size $SLURM_STEP_NUM_TASKS --distributed-port 29500"
    fi
    if [ -z "$workers" ] && [ -n "$cpu" ]; then workers=1; fi
    if [ -z "$workers" ]; then
        workers=$("$python" -c 'import torch; print(torch.cuda.device_count() or 1)') ||
            fail "$python cannot import torch; set PYTHON, or run: make setup"
        counted="$workers visible GPUs"
    fi
    number WORKERS "$workers"
    if [ -n "${SLURM_JOB_ID:-}" ] && [ "${SLURM_STEP_NUM_TASKS:-1}" -le 1 ] &&
        [ -z "${WORLD_SIZE:-}" ] && [ "$workers" -gt 1 ]; then
        fail "in a Slurm job fairseq takes its workers from the tasks of srun; put before the line:" \
            "torchrun --nproc_per_node $workers --no_python, or srun with one task per worker"
    fi
    # Compared with what fairseq is about to start (fairseq_dpq/fairseq_plugin/workers.py).
    export FAIRSEQ_DPQ_WORKERS="$workers"
    # fairseq would start as many as there are GPUs.
    if [ -n "${WORKERS:-}" ] && [ -z "$launched" ]; then
        start_flags="--distributed-world-size $workers"
    fi
}

show() { # PROGRAM WORDS...: the command as one could type it
    printf '%s' "$1"
    shift
    for word in "$@"; do
        case $word in
        *\'*) printf " '%s'" "$(printf '%s' "$word" | sed "s/'/'\\\\''/g")" ;;
        '' | *[!A-Za-z0-9_./:=,+-]*) printf " '%s'" "$word" ;;
        *) printf ' %s' "$word" ;;
        esac
    done
    echo
}
