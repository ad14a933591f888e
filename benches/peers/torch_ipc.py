#!/usr/bin/env python3
"""A weight cache as serving engines for PyTorch build it: `reduce_tensor`, pickle over a Unix socket, rebuild.

    torch_ipc.py serve CHECKPOINT SOCKET     loads every tensor of a folder onto the GPU and answers until killed
    torch_ipc.py attach SOCKET ROUNDS        prints one line of JSON: tensors, and milliseconds of each round

A round goes from connecting to the last tensor rebuilt; importing torch and starting CUDA are not in it, and
every round is a new process, since a rebuilt storage stays open in the process that opened it.
"""
import glob
import json
import os
import pickle
import socket
import subprocess
import sys
import time


def recv_exact(s, n):
    out = bytearray()
    while len(out) < n:
        piece = s.recv(min(1 << 20, n - len(out)))
        if not piece:
            raise EOFError("the server closed the connection")
        out += piece
    return bytes(out)


def serve(checkpoint, path):
    from safetensors.torch import load_file
    from torch.multiprocessing.reductions import reduce_tensor

    tensors = {}
    for f in sorted(glob.glob(os.path.join(checkpoint, "*.safetensors"))):
        tensors |= load_file(f, device="cuda")
    if os.path.exists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    print(f"serving {len(tensors)} tensors on {path}", flush=True)
    while True:
        s, _ = listener.accept()
        body = pickle.dumps({n: reduce_tensor(t) for n, t in tensors.items()})
        s.sendall(len(body).to_bytes(8, "little") + body)
        s.close()


def attach_once(path):
    import torch

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    s = socket.socket(socket.AF_UNIX)
    s.connect(path)
    body = recv_exact(s, int.from_bytes(recv_exact(s, 8), "little"))
    tensors = {n: rebuild(*args) for n, (rebuild, args) in pickle.loads(body).items()}
    ms = (time.perf_counter() - start) * 1e3
    print(json.dumps({"tensors": len(tensors), "ms": ms}), flush=True)


def main():
    match sys.argv[1:]:
        case ["serve", checkpoint, path]:
            serve(checkpoint, path)
        case ["attach-once", path]:
            attach_once(path)
        case ["attach", path, rounds]:
            out = [json.loads(subprocess.run([sys.executable, __file__, "attach-once", path], check=True, timeout=120,
                                             capture_output=True).stdout) for _ in range(int(rounds))]
            print(json.dumps({"tensors": out[0]["tensors"], "ms": [o["ms"] for o in out]}))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
