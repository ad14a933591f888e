#!/usr/bin/env bash
# Finds a CUDA toolkit to build with `--features cuda`, or brings what is needed of one. To be sourced:
#
#   . scripts/cuda-toolkit.sh
#
# A toolkit that is there (nvcc on PATH, or CUDA_HOME) is used as it is. Elsewhere nvcc and its headers come
# from PyPI, and libraries to link against are made from the names in cudarc's bindings: what they answer
# is an error, so a program built here starts here, finds no GPU, and runs where the real libraries are.
# Nothing needs root. It is done once; later it only sets variables:
#
#   CANDLE_CACHE_TOOLKIT_DIR  where to keep it (default: ~/.cache/candle-ipc-cache/cuda-13.0)
#   CUDA_COMPUTE_CAP          architecture to build for (default here: 90, Hopper)

_toolkit_say() { echo "cuda-toolkit: $*" >&2; }

# nvcc with its compiler, headers and runtime. Moved into place when whole.
_toolkit_nvcc() {
    [ -x "$_toolkit_dir/nvidia/cu13/bin/nvcc" ] && return 0
    _toolkit_say "bringing nvcc 13.0 from PyPI to $_toolkit_dir"
    mkdir -p "$(dirname "$_toolkit_dir")" || return 1
    local new
    new=$(mktemp -d "$_toolkit_dir.XXXXXX") || return 1
    if ! python3 -m pip install --quiet --no-deps --disable-pip-version-check --root-user-action ignore --target "$new" \
        nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 \
        nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-curand==10.4.0.35; then
        rm -rf "$new"
        _toolkit_say "pip could not install it: is python3 with pip here, and PyPI reachable?"
        return 1
    fi
    # Linkers look for the bare name, and build scripts for lib64.
    ln -sf libcudart.so.13 "$new/nvidia/cu13/lib/libcudart.so"
    ln -sfn lib "$new/nvidia/cu13/lib64"
    rm -rf "$_toolkit_dir"
    mv -T "$new" "$_toolkit_dir"
}

# The folder with the sources of the cudarc that Cargo.lock names.
_toolkit_cudarc() {
    local root version found
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || return 1
    version=$(awk '/^name = "cudarc"$/ { getline; gsub(/[^0-9.]/, ""); print; exit }' "$root/Cargo.lock")
    for _ in 1 2; do
        for found in "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/"cudarc-$version/src"; do
            [ -d "$found" ] && echo "$found" && return 0
        done
        cargo fetch --quiet --manifest-path "$root/Cargo.toml" >&2 || break
    done
    _toolkit_say "the sources of cudarc $version are not here, and cargo could not fetch them"
    return 1
}

# One library whose every function answers the given number, an error in that library's terms.
_toolkit_stub() { # bindings, module, library, soname, answer
    grep -ohE 'fn (cu|nvrtc|nccl)[A-Za-z0-9_]+' "$1/$2/sys/mod.rs" | cut -d' ' -f2 | sort -u |
        sed "s/.*/int &(void) { return $5; }/" |
        "${CC:-cc}" -shared -fPIC -w -Wl,-soname,"$4" -x c -o "$_toolkit_dir/stubs.new/lib$3.so" - &&
        ln -sf "lib$3.so" "$_toolkit_dir/stubs.new/$4"
}

_toolkit_stubs() {
    [ -e "$_toolkit_dir/stubs/libnccl.so" ] && return 0
    local bindings
    bindings=$(_toolkit_cudarc) || return 1
    rm -rf "$_toolkit_dir/stubs.new"
    mkdir -p "$_toolkit_dir/stubs.new" &&
        _toolkit_stub "$bindings" driver cuda libcuda.so.1 34 &&
        _toolkit_stub "$bindings" nvrtc nvrtc libnvrtc.so.13 11 &&
        _toolkit_stub "$bindings" cublas cublas libcublas.so.13 1 &&
        _toolkit_stub "$bindings" cublaslt cublasLt libcublasLt.so.13 1 &&
        _toolkit_stub "$bindings" curand curand libcurand.so.10 101 &&
        _toolkit_stub "$bindings" nccl nccl libnccl.so.2 1 &&
        rm -rf "$_toolkit_dir/stubs" &&
        mv -T "$_toolkit_dir/stubs.new" "$_toolkit_dir/stubs"
}

_toolkit_main() {
    if [ -n "${CUDA_HOME:-}" ] && [ -x "$CUDA_HOME/bin/nvcc" ]; then
        export PATH="$CUDA_HOME/bin:$PATH"
    elif command -v nvcc >/dev/null; then
        CUDA_HOME=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
    else
        _toolkit_nvcc && _toolkit_stubs || return 1
        CUDA_HOME=$_toolkit_dir/nvidia/cu13
        export PATH="$CUDA_HOME/bin:$PATH"
        export CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-90}
        # Not RUSTFLAGS: a change there builds everything anew.
        export LIBRARY_PATH="$_toolkit_dir/stubs:$CUDA_HOME/lib${LIBRARY_PATH:+:$LIBRARY_PATH}"
        # Programs built here can start here: they find no GPU.
        export CANDLE_CACHE_STUBS="$_toolkit_dir/stubs:$CUDA_HOME/lib"
    fi
    export CUDA_HOME CUDA_PATH=$CUDA_HOME
    _toolkit_say "$(nvcc --version | grep -o 'release [0-9.]*') in $CUDA_HOME"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    _toolkit_say "source it: . scripts/cuda-toolkit.sh"
    exit 2
fi
_toolkit_dir=${CANDLE_CACHE_TOOLKIT_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/candle-ipc-cache/cuda-13.0}
_toolkit_main
_toolkit_status=$?
unset -f _toolkit_say _toolkit_nvcc _toolkit_cudarc _toolkit_stub _toolkit_stubs _toolkit_main
unset _toolkit_dir
return $_toolkit_status
