#!/usr/bin/env python3
"""Writes checkpoints of random weights for the benches.

    make_checkpoint.py llama DIR [--layers 32] [--hidden 4096] [--intermediate 14336] [--vocab 128256] [--heads 32] [--kv-heads 8] [--seed 1]
    make_checkpoint.py many DIR COUNT        COUNT tensors of 4096 BF16 elements each

A Llama of BF16 weights in shards of about 4 GiB with an index, a config.json and a tokenizer.json whose words are "t0",
"t1", ... for the tokens of those numbers. The defaults are the shape of an
8B model: 291 tensors, 15 GiB. Needs torch and safetensors; draws on the GPU where there is one.
"""
import argparse
import json
import os

import torch
from safetensors.torch import save_file

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rand(*shape, scale=0.02):
    return (torch.randn(*shape, device=DEVICE, dtype=torch.float32) * scale).to(torch.bfloat16).cpu()


def llama_tensors(a):
    kv = a.hidden // a.heads * a.kv_heads
    yield "model.embed_tokens.weight", (a.vocab, a.hidden)
    for i in range(a.layers):
        p = f"model.layers.{i}."
        yield p + "input_layernorm.weight", (a.hidden,)
        yield p + "self_attn.q_proj.weight", (a.hidden, a.hidden)
        yield p + "self_attn.k_proj.weight", (kv, a.hidden)
        yield p + "self_attn.v_proj.weight", (kv, a.hidden)
        yield p + "self_attn.o_proj.weight", (a.hidden, a.hidden)
        yield p + "post_attention_layernorm.weight", (a.hidden,)
        yield p + "mlp.gate_proj.weight", (a.intermediate, a.hidden)
        yield p + "mlp.up_proj.weight", (a.intermediate, a.hidden)
        yield p + "mlp.down_proj.weight", (a.hidden, a.intermediate)
    yield "model.norm.weight", (a.hidden,)
    yield "lm_head.weight", (a.vocab, a.hidden)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("kind", choices=["llama", "many"])
    p.add_argument("dir")
    p.add_argument("count", nargs="?", type=int, default=0)
    for name, default in (("layers", 32), ("hidden", 4096), ("intermediate", 14336), ("vocab", 128256), ("heads", 32),
                          ("kv-heads", 8)):
        p.add_argument("--" + name, type=int, default=default)
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    torch.manual_seed(a.seed)
    os.makedirs(a.dir, exist_ok=True)
    if a.kind == "many":
        save_file({f"layers.{i}.weight": rand(64, 64) for i in range(a.count)}, os.path.join(a.dir, "model.safetensors"))
        return
    shards, shard, size = [], {}, 0
    for name, shape in llama_tensors(a):
        # Norm weights near one, as trained ones are, so that the logits stay finite.
        t = rand(*shape) if len(shape) > 1 else rand(*shape) + 1
        shard[name] = t
        size += t.numel() * 2
        if size > 4 << 30:
            shards.append(shard)
            shard, size = {}, 0
    shards.append(shard)
    index = {}
    for i, tensors in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, os.path.join(a.dir, file))
        index |= dict.fromkeys(tensors, file)
    with open(os.path.join(a.dir, "model.safetensors.index.json"), "w") as f:
        json.dump({"metadata": {}, "weight_map": index}, f)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": a.hidden,
              "intermediate_size": a.intermediate, "vocab_size": a.vocab, "num_hidden_layers": a.layers,
              "num_attention_heads": a.heads, "num_key_value_heads": a.kv_heads, "rms_norm_eps": 1e-5,
              "rope_theta": 500000.0, "max_position_embeddings": 8192, "tie_word_embeddings": False,
              "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
    with open(os.path.join(a.dir, "config.json"), "w") as f:
        json.dump(config, f)
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
                 "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
                 "model": {"type": "WordLevel", "unk_token": "t0", "vocab": {f"t{i}": i for i in range(a.vocab)}}}
    with open(os.path.join(a.dir, "tokenizer.json"), "w") as f:
        json.dump(tokenizer, f)


if __name__ == "__main__":
    main()
