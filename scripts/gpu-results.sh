#!/usr/bin/env bash
# Every figure of docs/results.md, on a machine with an NVIDIA GPU: checks and times, and prints a table last.
#
#   scripts/gpu-results.sh [check|smollm2|many|small|llama|quantize|models|two|tp]...      default: all but two and tp
#
# Takes the programs from $CANDLE_CACHE_PROGRAMS (gpu, models, decode, quantized, attach, llama, candle-cache), else builds them.
# `llama` writes 16 GiB of random weights to $CANDLE_CACHE_WORK (default: a temp folder) and needs torch, as does `many`
# for its peer. `two` and `tp` need two GPUs,
# `tp` and its NCCL, which torch brings.
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(check smollm2 many small llama quantize models)

if [ -z "${CANDLE_CACHE_PROGRAMS:-}" ]; then
    . scripts/cuda-toolkit.sh
    cargo build --release --features nccl --bins --examples --benches --tests || exit 1
    CANDLE_CACHE_PROGRAMS=$(mktemp -d)
    for f in gpu models decode quantized attach; do
        cp "$(ls -t target/release/deps/$f-* | grep -v '\.d$' | head -n 1)" "$CANDLE_CACHE_PROGRAMS/$f"
    done
    cp target/release/candle-cache target/release/examples/llama "$CANDLE_CACHE_PROGRAMS/"
fi
PATH=$CANDLE_CACHE_PROGRAMS:$PATH
work=${CANDLE_CACHE_WORK:-$(mktemp -d)}
mkdir -p "$work"
rows=$work/rows
: >"$rows"
row() { printf '%-58s %s\n' "$1" "$2" | tee -a "$rows"; }
used() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -i "${1:-0}"; }
of_process() { nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader | awk -F', ' -v p="$1" '$1==p {print $2}'; }

export CANDLE_CACHE_SOCKET_DIR=$work/s
serve() {
    rm -rf "$CANDLE_CACHE_SOCKET_DIR"
    mkdir -m 700 "$CANDLE_CACHE_SOCKET_DIR"
    coproc DAEMON { exec candle-cache serve 2>>"$work/daemon.log"; }
    daemon=$DAEMON_PID
    read -r -t 10 _ <&"${DAEMON[0]}" || { echo "the daemon did not start"; cat "$work/daemon.log"; exit 1; }
}
stop() { kill "$daemon" 2>/dev/null; wait "$daemon" 2>/dev/null; }
trap 'kill "${daemon:-}" 2>/dev/null; [ -n "${CANDLE_CACHE_WORK:-}" ] || rm -rf "$work"' EXIT

check() {
    echo "== tests on the device"
    gpu --nocapture --test-threads=1 >"$work/gpu.log" 2>&1
    row "tests/gpu.rs" "$(grep '^test result' "$work/gpu.log" | tail -n 1)"
    grep -E 'FAILED|panicked|skipped|difference' "$work/gpu.log" | sort | uniq -c | head -n 60
    [ -n "${OUT:-}" ] && cp "$work/gpu.log" "$OUT/"
}

chat() { # name, further arguments
    llama --device cuda:0 --raw --print-tokens --max-tokens 64 --prompt "Count: 1, 2, 3, 4, 5, 6," "$@" 2>>"$work/chat.log"
}

smollm2() {
    echo "== SmolLM2"
    local model=${CANDLE_CACHE_SMOLLM2:-fixtures/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf}
    serve
    candle-cache load "$model" --name smollm2 --device cuda:0
    chat --model smollm2 --checkpoint "$model" >"$work/cache.tokens"
    chat --no-cache --model "$model" >"$work/file.tokens"
    row "SmolLM2 on the GPU: tokens from cache and file" \
        "$(wc -l <"$work/cache.tokens"), $(cmp -s "$work/cache.tokens" "$work/file.tokens" && echo equal || echo DIFFERENT)"
    tail -n 4 "$work/chat.log"
    stop
}

many() {
    echo "== attach times beside the peer"
    python3 benches/make_checkpoint.py many "$work/many-10000" 10000
    python3 benches/make_checkpoint.py many "$work/many-723" 723
    python3 benches/make_checkpoint.py many "$work/many-291" 291
    attach --device cuda:0 --model "$work/many-291" --model "$work/many-723" --model "$work/many-10000" --peer \
        --program "$(command -v candle-cache)" --peers "$root/benches/peers" 2>&1 | tee "$work/attach.table"
    grep many "$work/attach.table" >>"$rows"
}

llama8b() {
    echo "== Llama of 8B shape"
    local model=$work/llama8b
    [ -f "$model/config.json" ] || python3 benches/make_checkpoint.py llama "$model"
    serve
    local before; before=$(used)
    local start=$SECONDS
    candle-cache load "$model" --name llama8b --device cuda:0
    row "load of $(du -sBG "$model" | cut -f1) into the cache" "$((SECONDS - start)) s"
    row "GPU memory: entry alone (no process has it open)" "$(($(used) - before)) MiB; of the daemon: '$(of_process "$daemon")'"
    candle-cache status
    for source in cache disk; do
        decode --name llama8b --checkpoint "$model" --memory $source 2>&1 | tee -a "$rows"
    done
    decode_both llama8b "$model" 8B

    # Three engines at once.
    local pids=() pipes=()
    before=$(used)
    for i in 1 2 3; do
        mkfifo "$work/stay$i"
        decode --name llama8b --checkpoint "$model" --memory cache --stay <"$work/stay$i" >"$work/engine$i" 2>&1 &
        pids+=($!)
    done
    exec 7>"$work/stay1" 8>"$work/stay2" 9>"$work/stay3"
    for i in 1 2 3; do timeout 120 bash -c "until grep -q memory '$work/engine$i'; do sleep 0.2; done"; done
    row "GPU memory: three engines beside the entry" "$(($(used) - before)) MiB"

    # The entry is unloaded, the daemon dies, the GPU fills, and the engines go on.
    candle-cache unload llama8b && echo "unload should have been refused: engines hold the entry"
    candle-cache unload llama8b --force
    row "status after a forced unload" "$(candle-cache status --json)"
    kill -KILL "$daemon"; wait "$daemon" 2>/dev/null
    python3 - <<'PYTHON'
import torch
free, total = torch.cuda.mem_get_info()
junk = torch.full((max(free - (4 << 30), 1 << 20),), 0xAB, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
PYTHON
    exec 7>&- 8>&- 9>&-
    wait "${pids[@]}"
    for i in 1 2 3; do row "engine $i, its daemon killed and the GPU filled meanwhile" "$(grep meanwhile "$work/engine$i")"; done
    sleep 1
    row "GPU memory: all gone with the last" "$(used) MiB in use"
    attach --device cuda:0 --model "$model" --peer --program "$(command -v candle-cache)" --peers "$root/benches/peers" \
        --attaches 15 2>&1 | tee "$work/attach8b.table"
    grep -E '^llama8b' "$work/attach8b.table" >>"$rows"
}

small() {
    echo "== a small Llama"
    local model=$work/small
    python3 benches/make_checkpoint.py llama "$model" --layers 12 --hidden 768 --intermediate 2048 --vocab 32000 --heads 12 \
        --kv-heads 12
    serve
    candle-cache load "$model" --name small --device cuda:0
    decode_both small "$model" small --decode 256
    stop
}

# On candle's default stream, and on a stream of the device's own.
decode_both() { # entry, checkpoint, label, further arguments
    local stream
    for stream in "" --stream; do
        decode --name "$1" --checkpoint "$2" $stream "${@:4}" 2>&1 | tee "$work/decode.table"
        grep -E 'logits|ratio, median|model ready' "$work/decode.table" | sed "s/^/$3${stream:+, $stream}: /" >>"$rows"
    done
}

# Seconds and peak resident memory (MiB) of a command, which must succeed.
measured() {
    python3 - "$@" <<'PYTHON'
import resource, subprocess, sys, time
start = time.monotonic()
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(f"{time.monotonic() - start:.2f} s, {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024} MiB")
PYTHON
}

quantize() {
    echo "== quantizing"
    local model=$work/llama1b threads
    [ -f "$model/config.json" ] || python3 benches/make_checkpoint.py llama "$model" --layers 16 --hidden 2048 --intermediate 8192 \
        --heads 32 --kv-heads 8
    serve
    candle-cache plan "$model" --quantize q4k | tail -n 6 | tee -a "$rows"
    row "1B shape, as it is, 16 threads: time, peak memory" "$(measured candle-cache load "$model" --device cuda:0 --force)"
    for threads in 16 8 4 2 1; do
        row "1B shape, q4k, $threads threads: time, peak memory" \
            "$(measured candle-cache load "$model" --device cuda:0 --quantize q4k --threads $threads --force)"
    done
    # Engines of the 8B shape: candle's own tensors beside those from the cache.
    model=$work/llama8b
    [ -f "$model/config.json" ] || python3 benches/make_checkpoint.py llama "$model"
    local recipe=default=q4k,lm_head=q6k
    row "8B shape, planned bytes" "$(candle-cache plan "$model" --quantize $recipe | tail -n 1)"
    row "8B shape, $recipe: time, peak memory" \
        "$(measured candle-cache load "$model" --name llama8b-q4k --device cuda:0 --quantize $recipe)"
    candle-cache status | tee -a "$rows"
    local source
    for source in cache own; do
        quantized --name llama8b-q4k --checkpoint "$model" --recipe $recipe --memory $source 2>&1 | tee -a "$rows"
    done
    quantized --name llama8b-q4k --checkpoint "$model" --recipe $recipe 2>&1 | tee -a "$rows"
    stop
    attach --device cuda:0 --model "$model" --quantize $recipe --program "$(command -v candle-cache)" --attaches 15 2>&1 |
        tee "$work/attach-quantized.table"
    grep -E '^llama8b' "$work/attach-quantized.table" >>"$rows"
}

two() {
    echo "== two GPUs"
    gpu --nocapture --test-threads=1 another 2>&1 | tail -n 12
    nvidia-smi -L
    python3 benches/make_checkpoint.py many "$work/many-291" 291
    serve
    candle-cache load "$work/many-291" --name on0 --device cuda:0
    CUDA_VISIBLE_DEVICES=1 candle-cache load "$work/many-291" --name on1 --device cuda:0
    candle-cache status
    try() { # visible, name, what should happen
        local said
        if said=$(CUDA_VISIBLE_DEVICES=$1 attach --device cuda:0 --once "$2" --socket-dir "$CANDLE_CACHE_SOCKET_DIR" 2>&1); then
            said=attached
        fi
        row "visible $1, cuda:0, entry $2 (should be $3)" "${said:0:300}"
    }
    try 0 on0 attached; try 1 on0 refused; try 0 on1 refused; try 1 on1 attached
    try 1,0 on1 attached; try 1,0 on0 refused; try 0,1 on0 attached
    stop
}

# Models of candle-transformers, rebuilt from the cache on the GPU.
models() {
    echo "== models of candle-transformers"
    CANDLE_CACHE_TEST_DEVICE=cuda:0 CANDLE_CACHE_TEST_TABLE=$work/conformance.md command models --nocapture >"$work/models.log" 2>&1
    row "tests/models.rs" "$(grep '^test result' "$work/models.log" | tail -n 1)"
    row "models on the GPU" "$(grep -E '^On ' "$work/conformance.md" | tr '\n' ' ')"
    [ -n "${OUT:-}" ] && cp "$work/models.log" "$work/conformance.md" "$OUT/"
}

tokens_of() { # words, further arguments: what the example says on standard output
    llama --device cuda:0 --raw --print-tokens --max-tokens 64 --prompt "$1" "${@:2}" 2>>"$work/tp.log"
}

tp() {
    echo "== one model over two GPUs"
    local nccl; nccl=$(python3 -c 'import nvidia.nccl; print(nvidia.nccl.__path__[0] + "/lib")' 2>/dev/null)
    export LD_LIBRARY_PATH=${nccl:+$nccl:}${LD_LIBRARY_PATH:-}
    local model=$work/llama8b words="t17 t4242 t99 t1000 t31415 t777" plan=$root/examples/llama/tp.toml
    [ -f "$model/config.json" ] || python3 benches/make_checkpoint.py llama "$model"
    serve
    candle-cache load "$model" --name one --device cuda:0
    local dtype
    for dtype in bf16 f32; do tokens_of "$words" --model one --dtype $dtype >"$work/one-$dtype.tokens"; done
    candle-cache unload one
    local before=("$(used 0)" "$(used 1)")
    candle-cache load "$model" --name two --tp 2 --plan "$plan" --device cuda:0,cuda:1
    candle-cache status | tee -a "$rows"
    row "GPU memory: each rank's part of $(du -sBM "$model" | cut -f1)" \
        "$(($(used 0) - before[0])) MiB, $(($(used 1) - before[1])) MiB"
    # BF16 rounds a sum of two parts otherwise than one sum; in F32 the same weights show that nothing else differs.
    for dtype in bf16 f32; do
        tokens_of "$words" --model two --tp 2 --dtype $dtype >"$work/two-$dtype.tokens"
        row "8B shape, computed in $dtype: tokens of one GPU and of two" \
            "$(wc -l <"$work/one-$dtype.tokens"), $(wc -l <"$work/two-$dtype.tokens"); $(
                cmp "$work/one-$dtype.tokens" "$work/two-$dtype.tokens" 2>&1 && echo equal)"
    done
    candle-cache unload two

    # One name, two models in turn: an engine's ranks must be of one or of the other.
    local which
    for which in a b; do
        python3 benches/make_checkpoint.py llama "$work/small-$which" --layers 12 --hidden 768 --intermediate 2048 --vocab 32000 \
            --heads 12 --kv-heads 12 --seed "$([ $which = a ] && echo 1 || echo 2)"
        candle-cache load "$work/small-$which" --name turn --tp 2 --plan "$plan" --device cuda:0,cuda:1
        tokens_of "$words" --model turn --tp 2 >"$work/$which.tokens"
    done
    cmp -s "$work/a.tokens" "$work/b.tokens" && echo "the two models say the same: nothing is tested"
    touch "$work/turning"
    (
        while [ -e "$work/turning" ]; do
            for which in a b; do
                candle-cache load "$work/small-$which" --name turn --tp 2 --plan "$plan" --device cuda:0,cuda:1 >/dev/null 2>&1
            done
        done
    ) &
    local turner=$! of_a=0 of_b=0 refused=0 mixed=0
    for _ in 1 2 3 4 5 6 7 8; do
        if ! tokens_of "$words" --model turn --tp 2 >"$work/now.tokens"; then refused=$((refused + 1));
        elif cmp -s "$work/now.tokens" "$work/a.tokens"; then of_a=$((of_a + 1));
        elif cmp -s "$work/now.tokens" "$work/b.tokens"; then of_b=$((of_b + 1));
        else mixed=$((mixed + 1)); fi
    done
    rm -f "$work/turning"; wait $turner
    row "starts while the set was replaced all the time" "$of_a of a, $of_b of b, $refused refused, $mixed mixed"
    stop
    tail -n 12 "$work/tp.log"
}

for step in "${steps[@]}"; do
    case $step in
        check | smollm2 | many | small | quantize | models | two | tp) "$step" ;; llama) llama8b ;;
        *) echo "no such step: $step" >&2; exit 2 ;;
    esac
done
echo
echo "== $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | head -n 1)"
cat "$rows"
