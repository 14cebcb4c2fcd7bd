#!/bin/sh
# The same as: prepare.sh ptb
set -eu
exec sh "$(dirname "$0")/prepare.sh" ptb "$@"
