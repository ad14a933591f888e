//! What a rank's slabs hold: the very bytes that are its slice, converted and quantized as in the whole.

use std::os::unix::fs::FileExt;
use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_ipc_cache::loader::Proof;
use candle_ipc_cache::manifest::{Digest, ElementType};
use candle_ipc_cache::quantize::Quantize;
use candle_ipc_cache::shard::{Cut, Part, ShardId, slice};
use candle_ipc_cache::trace::{Asked, ShardHint};
use candle_ipc_cache::worker::select::{Selection, ShardPlan};
use candle_ipc_cache::worker::{LoadOptions, Loaded, TargetDtype};
use candle_ipc_cache::{AttachError, IpcCache, Trace};
use candle_nn::var_builder::Shard;

use crate::common::fixture;
use crate::support::{
    Raw, attach, fill, floats, manifest, open, options, rules, serve, stored, write,
};

fn planned(folder: &Path, text: &str) -> Selection {
    let plan = ShardPlan::read(&rules(folder, text)).unwrap();
    Selection::default().plan(plan)
}

/// Checks that every tensor of a rank holds the bytes of its slice of the whole.
fn check(rank: &Loaded, whole: &Loaded) -> usize {
    let part = manifest(rank).key.shard.tp;
    let mut cuts = 0;
    for entry in &manifest(rank).tensors {
        let all = stored(whole, &entry.name);
        let of = &manifest(whole).tensors[manifest(whole).find(&entry.name).unwrap()];
        let mine = match entry.cut {
            None => all,
            Some(dim) => {
                cuts += 1;
                let cut = Cut {
                    dim: dim as usize,
                    part,
                };
                let (shape, runs) = slice(of.element, &of.shape, cut).unwrap();
                assert_eq!(entry.shape, shape, "{}", entry.name);
                runs.gather(&all)
            }
        };
        assert_eq!(entry.element, of.element, "{}", entry.name);
        assert!(stored(rank, &entry.name) == mine, "{}", entry.name);
        assert_eq!(entry.stored, Digest::of(&mine), "{}", entry.name);
    }
    cuts
}

fn layer() -> Vec<Raw> {
    vec![
        floats("up.weight", &[64, 512], 1),
        floats("down.weight", &[64, 512], 2),
        floats("experts.weight", &[4, 8, 512], 3),
        floats("norm.weight", &[512], 4),
    ]
}

const RULES: &str = "[rules]\nup = 0\ndown = 1\nexperts = 2\n\"*norm*\" = \"replicate\"\n";

#[test]
fn the_slices_of_converted_and_quantized_tensors_are_those_of_the_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    write(&path, &layer());
    let checkpoint = open(&path);
    let quantized = |recipe: &str| Some(Quantize::new(recipe.parse().unwrap()));
    for (dtype, quantize) in [
        (TargetDtype::Stored, None),
        (TargetDtype::Bf16, None),
        (TargetDtype::Stored, quantized("q8_0")),
        (TargetDtype::F16, quantized("*.weight=q4k")),
    ] {
        let with = |selection, rank, size| LoadOptions {
            dtype,
            quantize: quantize.clone(),
            ..options(selection, rank, size)
        };
        let whole = fill(&checkpoint, &with(Selection::default(), 0, 1)).unwrap();
        for rank in 0..2 {
            let options = with(planned(folder.path(), RULES), rank, 2);
            let part = fill(&checkpoint, &options).unwrap();
            assert_eq!(check(&part, &whole), 3);
            let key = &manifest(&part).key;
            assert_eq!(key.shard.to_string(), format!("tp {rank}/2"));
            assert!(key.selection.starts_with("all, 3 of 4 tensors cut"));
            let sum = |loaded: &Loaded| -> u64 {
                let tensors = manifest(loaded).tensors.iter();
                tensors.map(|t| t.bytes).sum()
            };
            let replicated = stored(&whole, "norm.weight").len() as u64;
            assert_eq!(2 * sum(&part), sum(&whole) + replicated);
        }
    }
}

#[test]
fn the_two_halves_of_a_real_quantized_file_make_up_the_whole() {
    let path = fixture("smollm2/SmolLM2-135M-Instruct.Q4_1.gguf");
    let checkpoint = open(&path);
    let folder = tempfile::tempdir().unwrap();
    let text =
        "[rules]\n\"*.ffn_up\" = 0\n\"*.ffn_gate\" = 0\n\"*.ffn_down\" = 1\n\"token_embd\" = 0\n";
    let whole = fill(&checkpoint, &options(Selection::default(), 0, 1)).unwrap();
    for rank in 0..2 {
        let options = options(planned(folder.path(), text), rank, 2);
        let part = fill(&checkpoint, &options).unwrap();
        assert_eq!(check(&part, &whole), 91);
        let up = &manifest(&part).tensors[manifest(&part).find("blk.0.ffn_down.weight").unwrap()];
        assert!(up.element.is_quantized() && up.cut == Some(1));
    }
    // 1536 columns are 48 blocks: 32 ranks cannot share them.
    let options = options(planned(folder.path(), text), 0, 32);
    let error = fill(&checkpoint, &options).unwrap_err().to_string();
    assert!(error.contains("blk.0.ffn_down.weight"), "{error}");
    assert!(
        error.contains("dimension 1") && error.contains("blocks of 32"),
        "{error}"
    );
}

#[test]
fn slices_whose_rows_are_no_whole_blocks_are_refused_with_the_block() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    write(&path, &layer());
    let options = LoadOptions {
        quantize: Some(Quantize::new("q4k".parse().unwrap())),
        ..options(planned(folder.path(), RULES), 1, 4)
    };
    let error = fill(&open(&path), &options).unwrap_err().to_string();
    for said in [
        "`down.weight`",
        "dimension 1",
        "rank 1/4",
        "128 elements",
        "blocks of 256",
        "down.weight=q8_0",
    ] {
        assert!(error.contains(said), "{said}: {error}");
    }
}

#[test]
fn a_value_that_ruins_a_slice_is_told_where_it_lies_in_the_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let mut layer = layer();
    // Row 3, column 300 of `down`, whose second half is the second rank's.
    let at = 3 * 512 + 300;
    layer[1].3[4 * at..4 * at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    write(&path, &layer);
    let with = |rank| LoadOptions {
        quantize: Some(Quantize::new("q8_0".parse().unwrap())),
        ..options(planned(folder.path(), RULES), rank, 2)
    };
    fill(&open(&path), &with(0)).unwrap();
    let error = fill(&open(&path), &with(1)).unwrap_err().to_string();
    assert!(error.contains(&format!("element {at} ")), "{error}");
}

#[test]
fn equal_slices_share_a_place_and_a_slice_never_stands_for_a_whole_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let same = |name: &str, shape: &[usize]| floats(name, shape, 9);
    write(
        &path,
        &[
            same("a", &[4, 4]),
            same("b", &[4, 4]),
            // The first half of `a`, and whole.
            same("c", &[2, 4]),
        ],
    );
    let options = options(planned(folder.path(), "[rules]\na = 0\nb = 0\n"), 0, 2);
    let part = fill(&open(&path), &options).unwrap();
    let at = |name| manifest(&part).find(name).unwrap();
    assert_eq!(at("a"), at("b"));
    assert_ne!(at("a"), at("c"));
    assert_eq!(stored(&part, "a"), stored(&part, "c"));
    assert_eq!(manifest(&part).tensors[at("c")].cut, None);
}

#[test]
fn a_rank_is_proved_by_the_digest_of_its_own_slice() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    write(&path, &layer());
    let checkpoint = open(&path);
    let load = |rank| {
        fill(
            &checkpoint,
            &options(planned(folder.path(), RULES), rank, 2),
        )
        .unwrap()
    };
    let daemons: Vec<_> = (0..2).map(|rank| serve(load(rank))).collect();
    let engine = |rank: u16| {
        let config = daemons[rank as usize].config("m").tensor_parallel(rank, 2);
        IpcCache::attach(&config.checkpoint(&path), &Device::Cpu)
    };
    // The last element of `down` is the second rank's, and so is the last row of `up`.
    let tensor = checkpoint.tensors.iter().find(|t| t.name == "down.weight");
    let tensor = tensor.unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    let last = tensor.offset + tensor.bytes - 4;
    file.write_all_at(&1e9f32.to_le_bytes(), last).unwrap();
    file.sync_all().unwrap();
    let first = engine(0).unwrap();
    assert_eq!(first.report().identity, Proof::CheckpointHashed);
    match engine(1).unwrap_err() {
        AttachError::Mismatch(mismatch) => {
            assert_eq!(mismatch.differences.len(), 1, "{mismatch}");
            assert_eq!(mismatch.differences[0].field, "tensor `down.weight`");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_tensor_that_was_added_to_the_file_is_seen_by_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    write(&path, &layer());
    let options = options(planned(folder.path(), RULES), 0, 2);
    let daemon = serve(fill(&open(&path), &options).unwrap());
    let mut more = layer();
    more.push(floats("added.weight", &[4], 5));
    write(&path, &more);
    let config = daemon.config("m").tensor_parallel(0, 2);
    match IpcCache::attach(&config.checkpoint(&path), &Device::Cpu).unwrap_err() {
        AttachError::Mismatch(mismatch) => {
            assert_eq!(mismatch.differences[0].field, "tensor `added.weight`");
            assert!(mismatch.to_string().contains("--tp"), "{mismatch}");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn what_a_trace_asks_for_whole_as_well_is_kept_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    write(&path, &layer());
    let checkpoint = open(&path);
    let asked = |name: &str, cut: bool| Asked {
        name: name.into(),
        shape: None,
        dtype: None,
        shard: cut.then_some(ShardHint {
            dim: 0,
            rank: 0,
            size: 2,
        }),
    };
    let both = vec![
        asked("up.weight", false),
        asked("up.weight", true),
        asked("down.weight", true),
    ];
    let plan = ShardPlan::of_trace(&Trace::new(both, Vec::new()), "t.json").unwrap();
    let options = options(Selection::default().plan(plan), 0, 2);
    let daemon = serve(fill(&checkpoint, &options).unwrap());
    let config = daemon.config("m").tensor_parallel(0, 2);
    let cache = IpcCache::attach(&config, &Device::Cpu).unwrap();
    let shard = |rank| Shard {
        dim: 0,
        rank,
        world_size: 2,
    };
    let vb = cache.sharded(DType::F32);
    let get = |name: &str, shard| vb.get_with_hints((), name, shard);
    assert_eq!(get("down.weight", shard(0)).unwrap().dims(), [32, 512]);
    assert_eq!(get("up.weight", shard(1)).unwrap().dims(), [32, 512]);
    let whole = cache.var_builder(DType::F32).get((64, 512), "up.weight");
    assert_eq!(whole.unwrap().dims(), [64, 512]);
}

#[test]
fn a_stage_holds_what_it_keeps_and_says_so_of_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let layers: Vec<Raw> = (0..4)
        .map(|i| floats(&format!("layers.{i}.w.weight"), &[4, 4], i))
        .collect();
    write(&path, &layers);
    let stage = |keep: &str, rank| LoadOptions {
        name: Some("m".into()),
        selection: Selection::default().keep([keep.to_string()]),
        shard: ShardId {
            pp: Part::new(rank, 2),
            ..ShardId::default()
        },
        ..LoadOptions::default()
    };
    let options = stage("layers.0.*", 0);
    let loaded = fill(&open(&path), &options).unwrap();
    assert_eq!(manifest(&loaded).names().count(), 1);
    assert_eq!(loaded.manifest.tensors[0].element, ElementType::F32);
    let daemon = serve(loaded);
    let cache = attach(&daemon, options.shard);
    assert_eq!(cache.report().entry.shard.to_string(), "pp 0/2");
    let vb = cache.var_builder(candle_core::DType::F32);
    let held: Tensor = vb.get((4, 4), "layers.0.w.weight").unwrap();
    assert_eq!(held.dims(), [4, 4]);
    let error = vb.get((4, 4), "layers.1.w.weight").unwrap_err().to_string();
    assert!(error.contains("layers.0.w.weight"), "{error}");
    // Another stage of the same files is another entry, though it be asked for under the same label.
    let key = |keep, rank| {
        let options = stage(keep, rank);
        fill(&open(&path), &options).unwrap().manifest.key
    };
    let same = key("layers.0.*", 0).differences(&key("layers.0.*", 0));
    assert!(same.is_empty(), "{same:?}");
    let other = key("layers.0.*", 0).differences(&key("layers.1.*", 0));
    assert_eq!(other.len(), 1);
    assert_eq!(other[0].field, "selection");
}
