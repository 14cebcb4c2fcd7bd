#!/bin/sh
# The translation recipes' older name of score.sh. Sourced, so that messages name this script.
set -eu
. "$(dirname "$0")/score.sh"
