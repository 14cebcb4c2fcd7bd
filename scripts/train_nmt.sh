#!/bin/sh
# The translation recipes' older name of train.sh. Sourced, so that messages name this script.
set -eu
. "$(dirname "$0")/train.sh"
