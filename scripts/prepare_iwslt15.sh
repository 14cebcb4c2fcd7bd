#!/bin/sh
# The same as: prepare.sh iwslt15
set -eu
exec sh "$(dirname "$0")/prepare.sh" iwslt15 "$@"
