#!/bin/sh
# The same as: prepare.sh wikitext2
set -eu
exec sh "$(dirname "$0")/prepare.sh" wikitext2 "$@"
