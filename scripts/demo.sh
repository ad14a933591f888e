#!/usr/bin/env bash
# The whole path on a real model: builds, brings SmolLM2-135M, serves and loads it, chats from two processes.
# Needs Rust, a C compiler and Python 3 with pip. Leaves nothing running, and no socket.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/fixtures.sh
cargo build --release --bin candle-cache --example llama
target=$(cargo metadata --format-version 1 --no-deps |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')
cache=$target/release/candle-cache
llama=$target/release/examples/llama
model=${CANDLE_CACHE_FIXTURES:-fixtures}/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

work=$(mktemp -d)
export CANDLE_CACHE_SOCKET_DIR=$work/socket
mkdir -m 700 "$CANDLE_CACHE_SOCKET_DIR"
daemon=
finish() {
    if [ -n "$daemon" ] && kill "$daemon" 2>/dev/null; then
        wait "$daemon" || true
    fi
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

fail() {
    echo "demo.sh: $*" >&2
    exit 1
}

"$cache" serve &
daemon=$!
for _ in $(seq 100); do
    [ -S "$CANDLE_CACHE_SOCKET_DIR/daemon.sock" ] && break
    kill -0 "$daemon" 2>/dev/null || fail "the daemon ended"
    sleep 0.1
done
"$cache" load "$model" --name smollm2
"$cache" status

failed=
for process in 1 2; do
    echo
    echo "== process $process: The capital of France is"
    "$llama" --model smollm2 --checkpoint "$model" --max-tokens 48 --system "You are a helpful assistant." \
        --prompt "The capital of France is" >"$work/answer" 2>"$work/times" || failed=$?
    cat "$work/times" "$work/answer"
    [ -z "$failed" ] || fail "process $process ended with exit code $failed"
    grep -q Paris "$work/answer" || fail "the answer of process $process does not name Paris"
    grep '^attach' "$work/times" | sed "s/^/process $process: /" >>"$work/attach"
done

echo
"$cache" stop
wait "$daemon" || fail "the daemon ended with an error"
daemon=
[ ! -e "$CANDLE_CACHE_SOCKET_DIR/daemon.sock" ] || fail "a socket remains"
python3 - "$work" <<'PYTHON' || fail "a process is left running"
import glob, os, sys
left = []
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        with open(path, "rb") as environment:
            if os.fsencode(sys.argv[1]) in environment.read() and path != f"/proc/{os.getpid()}/environ":
                left.append(path)
    except OSError:
        pass  # Ended meanwhile, or not ours.
sys.exit(", ".join(left) or 0)
PYTHON
cat "$work/attach"
