#!/usr/bin/env bash
# Brings the real models and runs every test. Arguments go to `cargo test`.
# Needs Rust, a C compiler and Python 3 with pip.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/fixtures.sh
cargo test "$@"
