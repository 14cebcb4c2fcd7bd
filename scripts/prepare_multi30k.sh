#!/bin/sh
# The same as: prepare.sh multi30k
set -eu
exec sh "$(dirname "$0")/prepare.sh" multi30k "$@"
