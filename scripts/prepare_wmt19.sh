#!/bin/sh
# The same as: prepare.sh wmt19
set -eu
exec sh "$(dirname "$0")/prepare.sh" wmt19 "$@"
