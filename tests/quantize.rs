//! Quantization in the worker: what lies in the slabs is what candle makes of the same tensors, and what cannot be
//! done is refused by name before anything is read.
#![allow(missing_docs, clippy::unwrap_used)]

mod common;

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_ipc_cache::IpcCache;
use candle_ipc_cache::checkpoint::{Checkpoint, Options};
use candle_ipc_cache::manifest::{Digest, ElementType};
use candle_ipc_cache::quantize::{Imatrix, Quantize, TYPES, Target};
use candle_ipc_cache::slab::host::HostMapping;
use candle_ipc_cache::tensors::ggml_dtype;
use candle_ipc_cache::worker::{LoadOptions, Loaded, WorkerError, fill};
use common::{Daemon, assert_ok};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::Value;

/// Values as weights have them: small, of both signs.
fn weights(seed: u64, shape: &[usize], dtype: DType) -> Tensor {
    let mut random = StdRng::seed_from_u64(seed);
    let count = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|_| random.random_range(-0.2..0.2)).collect();
    let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
    tensor.to_dtype(dtype).unwrap()
}

fn write(folder: &Path, tensors: &[(&str, &Tensor)]) -> PathBuf {
    let path = folder.join("model.safetensors");
    let tensors = tensors
        .iter()
        .map(|(name, t)| (name.to_string(), (*t).clone()));
    candle_core::safetensors::save(&tensors.collect(), &path).unwrap();
    path
}

fn open(path: &Path) -> Checkpoint {
    Checkpoint::open(path, &Options::default()).unwrap()
}

fn by(recipe: &str) -> Quantize {
    Quantize::new(recipe.parse().unwrap())
}

fn options(how: Quantize) -> LoadOptions {
    LoadOptions {
        quantize: Some(how),
        threads: Some(3),
        ..LoadOptions::default()
    }
}

fn load(path: &Path, how: Quantize) -> Result<Loaded, WorkerError> {
    fill(&open(path), &options(how), &|_| {})
}

/// The type and the bytes of a tensor, as they lie in the slabs.
fn stored(loaded: &Loaded, name: &str) -> (ElementType, Vec<u8>) {
    let entry = &loaded.manifest.tensors[loaded.manifest.find(name).unwrap()];
    let fd = loaded.export.slabs[entry.slab as usize].as_fd();
    let slab = HostMapping::map(fd, None, "a slab").unwrap();
    let start = entry.offset as usize;
    let bytes = slab.as_slice()[start..start + entry.bytes as usize].to_vec();
    assert_eq!(Digest::of(&bytes), entry.stored, "{name}");
    (entry.element, bytes)
}

/// What candle makes of a tensor.
fn candles(tensor: &Tensor, dtype: GgmlDType) -> Vec<u8> {
    let plain = match dtype {
        GgmlDType::F32 => Some(DType::F32),
        GgmlDType::F16 => Some(DType::F16),
        GgmlDType::BF16 => Some(DType::BF16),
        _ => None,
    };
    let converted = plain.map(|plain| tensor.to_dtype(plain).unwrap());
    let tensor = converted.as_ref().unwrap_or(tensor);
    let quantized = QTensor::quantize(tensor, dtype).unwrap();
    quantized.data().unwrap().into_owned()
}

/// Every word of a recipe that stands for a type, and candle's name for it.
fn types() -> impl Iterator<Item = (&'static str, ElementType, GgmlDType)> {
    TYPES.iter().filter_map(|(word, target)| match target {
        Target::As(element) => Some((*word, *element, ggml_dtype(*element).unwrap())),
        Target::Stored => None,
    })
}

fn imatrix(folder: &Path, entries: &[(&str, Vec<f32>)]) -> Result<Imatrix, String> {
    let mut out = (entries.len() as i32).to_le_bytes().to_vec();
    for (name, values) in entries {
        out.extend((name.len() as i32).to_le_bytes());
        out.extend(name.as_bytes());
        out.extend(1i32.to_le_bytes());
        out.extend((values.len() as i32).to_le_bytes());
        out.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    }
    let path = folder.join("imatrix.dat");
    std::fs::write(&path, out).unwrap();
    Imatrix::read(&path).map_err(|e| e.to_string())
}

#[test]
fn every_type_has_candles_own_bytes_from_every_float() {
    let folder = tempfile::tempdir().unwrap();
    // Several pieces; more than one read; one row; and a vector of matrices.
    let tensors: Vec<(String, Tensor)> = [DType::F32, DType::BF16, DType::F16, DType::F64]
        .into_iter()
        .flat_map(|dtype| {
            [vec![300, 512], vec![1, 256], vec![3, 8, 256]]
                .into_iter()
                .enumerate()
                .map(move |(i, shape)| {
                    (
                        format!("{dtype:?}.{i}"),
                        weights(i as u64 + 1, &shape, dtype),
                    )
                })
        })
        .chain([("large".to_string(), weights(9, &[2304, 1024], DType::F32))])
        .collect();
    let named: Vec<(&str, &Tensor)> = tensors.iter().map(|(n, t)| (n.as_str(), t)).collect();
    let path = write(folder.path(), &named);
    for (word, element, dtype) in types() {
        let loaded = load(&path, by(word)).unwrap();
        for (name, tensor) in &tensors {
            let (found, bytes) = stored(&loaded, name);
            assert_eq!(found, element, "{name}");
            assert!(
                bytes == candles(tensor, dtype),
                "{name} as {word} has other bytes"
            );
        }
        assert_eq!(loaded.manifest.key.recipe, word);
    }
}

#[test]
fn importance_is_used_as_candle_uses_it_row_by_row_and_expert_by_expert() {
    let folder = tempfile::tempdir().unwrap();
    let columns = |seed: u64, n: usize| -> Vec<f32> {
        let mut random = StdRng::seed_from_u64(seed);
        (0..n).map(|_| random.random_range(0.0..3.0)).collect()
    };
    let long = 65_536 + 256;
    let plain = weights(1, &[300, 512], DType::F32);
    let rows = weights(2, &[3, long], DType::F32);
    let experts = weights(3, &[3, 200, 512], DType::BF16);
    let path = write(
        folder.path(),
        &[
            ("model.layers.0.mlp.up_proj.weight", &plain),
            ("rows", &rows),
            ("experts", &experts),
            ("unknown", &plain),
        ],
    );
    let (of_plain, of_rows, of_experts) = (columns(1, 512), columns(2, long), columns(3, 3 * 512));
    let entries = [
        ("blk.0.ffn_up.weight", of_plain.clone()),
        ("rows", of_rows.clone()),
        ("experts", of_experts.clone()),
    ];
    let matrix = Arc::new(imatrix(folder.path(), &entries).unwrap());
    for (word, _, dtype) in types().filter(|(word, ..)| word.ends_with('k') && *word != "q8k") {
        let how = Quantize {
            imatrix: Some(matrix.clone()),
            ..by(word)
        };
        let loaded = load(&path, how).unwrap();
        let wanted = |tensor: &Tensor, important: &[f32]| {
            let quantized = QTensor::quantize_imatrix(tensor, important, dtype).unwrap();
            quantized.data().unwrap().into_owned()
        };
        let up = stored(&loaded, "model.layers.0.mlp.up_proj.weight").1;
        assert!(up == wanted(&plain, &of_plain), "{word}");
        assert!(
            up != candles(&plain, dtype),
            "{word}: importance has no effect"
        );
        assert!(
            stored(&loaded, "rows").1 == wanted(&rows, &of_rows),
            "{word}"
        );
        let each: Vec<u8> = (0..3)
            .flat_map(|i| {
                let expert = experts.get(i).unwrap();
                wanted(&expert, &of_experts[i * 512..(i + 1) * 512])
            })
            .collect();
        assert!(stored(&loaded, "experts").1 == each, "{word}");
        assert!(
            stored(&loaded, "unknown").1 == candles(&plain, dtype),
            "{word}"
        );
        assert!(
            loaded
                .manifest
                .key
                .recipe
                .starts_with(&format!("{word}; imatrix "))
        );
    }
}

#[test]
fn how_many_threads_there_are_does_not_show() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = weights(1, &[1024, 1024], DType::BF16);
    let small = weights(2, &[16, 256], DType::F32);
    let path = write(
        folder.path(),
        &[("a", &tensor), ("b", &small), ("c", &small)],
    );
    let root = |threads| {
        let options = LoadOptions {
            threads: Some(threads),
            ..options(by("q4k"))
        };
        fill(&open(&path), &options, &|_| {}).unwrap().manifest.root
    };
    assert_eq!(root(1), root(2));
    assert_eq!(root(1), root(16));
}

#[test]
fn values_that_no_block_holds_are_refused_with_their_place() {
    let folder = tempfile::tempdir().unwrap();
    let clean = weights(1, &[600, 512], DType::F32);
    let clean: Vec<f32> = clean.flatten_all().unwrap().to_vec1().unwrap();
    // In the second piece, after one that is as bad: the first is named.
    let (first, second) = (70_001, 150_000);
    for (bad, wanted) in [
        (f32::NAN, "NaN"),
        (f32::INFINITY, "inf"),
        (f32::NEG_INFINITY, "-inf"),
        (3e38, "3e38"),
        (-1e12, "-1e12"),
        (2e8, "2e8"),
    ] {
        let mut values = clean.clone();
        values[first] = bad;
        values[second] = bad;
        let tensor = Tensor::from_vec(values, (600, 512), &Device::Cpu).unwrap();
        let path = write(folder.path(), &[("layers.0.up.weight", &tensor)]);
        for (word, element, dtype) in types() {
            let outcome = load(&path, by(word));
            // A type with a scale of F32 holds the large ones, and types without blocks hold all.
            let holds = match element {
                ElementType::Q8K => bad.is_finite(),
                // What is no number already stays what it is.
                ElementType::F16 => !bad.is_finite(),
                ElementType::Q6K => bad == 2e8,
                _ => !element.is_quantized(),
            };
            if holds {
                let bytes = stored(&outcome.unwrap(), "layers.0.up.weight").1;
                assert!(bytes == candles(&tensor, dtype), "{word}");
                continue;
            }
            let error = outcome.expect_err(word);
            assert!(
                matches!(error, WorkerError::Ruined { index, to, .. } if index == first as u64 && to == element),
                "{word} {bad}: {error}"
            );
            let text = error.to_string();
            for part in ["layers.0.up.weight", wanted, "70001", "--allow-nonfinite"] {
                assert!(text.contains(part), "{word}: {part} is missing in: {text}");
            }
            let how = Quantize {
                allow_nonfinite: true,
                ..by(word)
            };
            let allowed = load(&path, how).unwrap();
            assert!(
                stored(&allowed, "layers.0.up.weight").1 == candles(&tensor, dtype),
                "{word}"
            );
        }
    }
}

/// Sub-blocks of equal values: candle's q2k, q4k and q5k make zeros of them.
#[test]
fn what_candle_loses_is_refused_and_not_published() {
    let folder = tempfile::tempdir().unwrap();
    let usual: Vec<f32> = weights(1, &[64, 256], DType::F32)
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap();
    let with = |change: &dyn Fn(usize, f32) -> f32| {
        let values: Vec<f32> = usual
            .iter()
            .enumerate()
            .map(|(i, v)| change(i, *v))
            .collect();
        let tensor = Tensor::from_vec(values, (64, 256), &Device::Cpu).unwrap();
        write(folder.path(), &[("up.weight", &tensor)])
    };
    let lost = |word: &str, path: &Path| match load(path, by(word)) {
        Ok(_) => None,
        Err(WorkerError::Ruined { index, .. }) => Some(index),
        Err(other) => panic!("{word}: {other}"),
    };
    let constant = with(&|i, v| if (8192..8224).contains(&i) { 0.5 } else { v });
    for (word, element, _) in types().filter(|(_, element, _)| element.is_quantized()) {
        let zeros = matches!(word, "q2k" | "q4k" | "q5k");
        assert_eq!(lost(word, &constant), zeros.then_some(8192), "{word}");
        assert!(element.is_quantized());
    }
    // Small values in a tensor of usual ones are nothing beside them; a tensor of small ones alone is lost as a whole.
    let path = with(&|i, v| if i < 512 { v * 1e-7 } else { v });
    for (word, ..) in types() {
        assert_eq!(lost(word, &path), None, "{word}");
    }
    let path = with(&|_, v| v * 1e-6);
    for word in ["q4k", "q5k", "q6k", "q8_0", "q3k"] {
        assert!(lost(word, &path).is_some(), "{word}");
    }
    // Heavy tails are no loss.
    let path = with(&|i, v| if i % 97 == 0 { v * 300.0 } else { v * v * v });
    for (word, ..) in types() {
        assert_eq!(lost(word, &path), None, "{word}");
    }
    // A recipe's floats stay numbers, too.
    let path = with(&|i, v| if i == 77 { 1e5 } else { v });
    assert_eq!(lost("f16", &path), Some(77));
    assert_eq!(lost("bf16", &path), None);
}

#[test]
fn columns_that_do_not_matter_at_all_do_not_ruin_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = weights(1, &[4, 8, 512], DType::F32);
    let path = write(folder.path(), &[("experts", &tensor)]);
    // One expert that no text reached, and one with a block of columns that nothing passed through.
    let mut columns = vec![1.0; 4 * 512];
    columns[512..1024].fill(0.0);
    columns[1024..1280].fill(0.0);
    let matrix = Arc::new(imatrix(folder.path(), &[("experts", columns)]).unwrap());
    for (word, element, dtype) in types().filter(|(w, ..)| w.ends_with('k') && *w != "q8k") {
        let how = Quantize {
            imatrix: Some(matrix.clone()),
            ..by(word)
        };
        let loaded = load(&path, how).unwrap();
        let bytes = stored(&loaded, "experts").1;
        let storage = QStorage::from_data(bytes.into(), &Device::Cpu, dtype).unwrap();
        let made = QTensor::new(storage, (4, 8, 512)).unwrap();
        let made = made.dequantize(&Device::Cpu).unwrap();
        for expert in 0..4 {
            let (a, b) = (tensor.get(expert).unwrap(), made.get(expert).unwrap());
            let square = |t: &Tensor| {
                t.sqr()
                    .unwrap()
                    .mean_all()
                    .unwrap()
                    .to_scalar::<f32>()
                    .unwrap()
            };
            let error = square(&(&a - &b).unwrap()) / square(&a);
            assert!(error < 0.1, "{element}, expert {expert}: {error}");
        }
    }
}

#[test]
fn what_cannot_be_followed_is_refused_before_a_tensor_is_looked_at() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = weights(1, &[64, 256], DType::F32);
    let odd = weights(2, &[64, 288], DType::F32);
    let named = [
        ("lm_head.weight", &tensor),
        ("a.down_proj.weight", &odd),
        ("a.up_proj.weight", &tensor),
    ];
    let path = write(folder.path(), &named);
    let other = imatrix(folder.path(), &[("blk.0.attn_q.weight", vec![1.0; 64])]).unwrap();
    let short = imatrix(folder.path(), &[("a.up_proj.weight", vec![1.0; 64])]).unwrap();
    let with = |recipe: &str, matrix: Imatrix| Quantize {
        imatrix: Some(Arc::new(matrix)),
        ..by(recipe)
    };
    for (how, wanted) in [
        (
            by("default=q4k,lm_haed=q6k"),
            "`lm_haed=q6k` names no tensor",
        ),
        (
            by("a.*=q4k/q8_0,*up*=q5k"),
            "`*up*=q5k` and `a.*=q4k/q8_0` both name",
        ),
        (
            by("*.down_proj=q4k"),
            "the rule `*.down_proj=q4k`: a row of",
        ),
        (with("q4k", other), "has no entry for any"),
        (
            with("q4k", short),
            "64 values for `a.up_proj.weight`, whose rows have 256",
        ),
        (
            with("q8_0", imatrix(folder.path(), &[("x", vec![1.0])]).unwrap()),
            "would not be used",
        ),
    ] {
        let told = AtomicUsize::new(0);
        let outcome = fill(&open(&path), &options(how), &|_| {
            told.fetch_add(1, Ordering::Relaxed);
        });
        let error = outcome.expect_err(wanted);
        assert!(matches!(error, WorkerError::Recipe(_)), "{error}");
        assert!(error.to_string().contains(wanted), "{wanted}: {error}");
        // Looking for equal tensors is the first thing that reads, and it tells that it begins.
        assert_eq!(told.into_inner(), 0, "{wanted}");
    }
}

#[test]
fn equal_tensors_share_a_place_unless_they_become_different() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = weights(1, &[64, 256], DType::F32);
    let named = [
        ("model.embed_tokens.weight", &tensor),
        ("lm_head.weight", &tensor),
    ];
    let path = write(folder.path(), &named);
    let tied = load(&path, by("q4k")).unwrap();
    assert_eq!(tied.manifest.aliases.len(), 1);
    assert_eq!(stored(&tied, "lm_head.weight").0, ElementType::Q6K);
    let parted = load(&path, by("default=q4k,lm_head=q8_0")).unwrap();
    assert_eq!(parted.manifest.aliases.len(), 0);
    assert_eq!(stored(&parted, "lm_head.weight").0, ElementType::Q8_0);
    let embedding = stored(&parted, "model.embed_tokens.weight");
    assert_eq!(embedding.0, ElementType::Q6K);
    assert!(embedding.1 == candles(&tensor, GgmlDType::Q6K));
}

#[test]
fn blocks_are_dequantized_and_quantized_again_when_told() {
    use candle_core::quantized::gguf_file;
    let folder = tempfile::tempdir().unwrap();
    let tensor = weights(1, &[300, 512], DType::F32);
    for (source, from) in [(GgmlDType::Q8_0, "Q8_0"), (GgmlDType::Q6K, "Q6_K")] {
        let blocks = QTensor::quantize(&tensor, source).unwrap();
        let path = folder.path().join("model.gguf");
        let mut file = std::fs::File::create(&path).unwrap();
        gguf_file::write(&mut file, &[], &[("a.weight", &blocks)]).unwrap();
        let error = load(&path, by("q4k")).unwrap_err().to_string();
        assert!(
            error.contains("--requantize") && error.contains(from),
            "{error}"
        );
        for (word, _, dtype) in types().filter(|(word, ..)| word.starts_with('q')) {
            let how = Quantize {
                requantize: true,
                ..by(word)
            };
            let loaded = load(&path, how).unwrap();
            let floats = blocks.dequantize(&Device::Cpu).unwrap();
            // To its own type it stays what it is.
            let wanted = if dtype == source {
                blocks.data().unwrap().into_owned()
            } else {
                candles(&floats, dtype)
            };
            assert!(stored(&loaded, "a.weight").1 == wanted, "{from} to {word}");
        }
    }
}

#[test]
fn the_program_plans_what_it_then_loads_and_the_recipe_is_part_of_the_key() {
    let folder = tempfile::tempdir().unwrap();
    let square = weights(1, &[256, 256], DType::BF16);
    let norm = weights(2, &[256], DType::BF16);
    let odd = weights(3, &[256, 288], DType::BF16);
    let path = write(
        folder.path(),
        &[
            ("lm_head.weight", &square),
            ("layers.0.up.weight", &weights(4, &[256, 256], DType::BF16)),
            ("layers.0.down.weight", &odd),
            ("norm.weight", &norm),
        ],
    );
    // Of a file that was written within the same tick of the clock nobody can say later that it is the same.
    std::thread::sleep(std::time::Duration::from_millis(50));
    let path = path.to_str().unwrap();
    let daemon = Daemon::start();
    let json = |args: &[&str]| -> Value {
        let output = daemon.run(args);
        assert_ok(&output);
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let recipe = folder.path().join("r.toml");
    std::fs::write(
        &recipe,
        "default = \"q4k/q8_0\"\n[rules]\nlm_head = \"q5k\"\n",
    )
    .unwrap();
    let text = "lm_head=q5k,default=q4k/q8_0";

    let plan = json(&[
        "plan",
        path,
        "--quantize",
        recipe.to_str().unwrap(),
        "--json",
    ]);
    let becomes = |name: &str| {
        let tensors = plan["tensors"].as_array().unwrap();
        let tensor = tensors.iter().find(|t| t["name"] == name).unwrap();
        (
            tensor["to"].as_str().unwrap(),
            tensor["why"].as_str().unwrap(),
        )
    };
    assert_eq!(becomes("lm_head.weight"), ("Q5_K", "rule lm_head=q5k"));
    assert_eq!(becomes("layers.0.up.weight"), ("Q4_K", "default"));
    assert_eq!(becomes("layers.0.down.weight"), ("Q8_0", "default"));
    assert_eq!(becomes("norm.weight"), ("BF16", "a vector"));
    let table = daemon.run(&["plan", path, "--quantize", text]);
    assert_ok(&table);
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(
        table.contains("recipe default=q4k/q8_0,lm_head=q5k: 4 tensors"),
        "{table}"
    );

    let load = |extra: &[&str]| json(&[&["load", path, "--name", "m", "--json"], extra].concat());
    let loaded = load(&["--quantize", text]);
    assert_eq!(loaded["result"], "loaded");
    let cache = IpcCache::attach(&daemon.config("m"), &Device::Cpu).unwrap();
    for tensor in &cache.manifest().tensors {
        assert_eq!(becomes(&tensor.name).0, tensor.element.as_str());
    }
    let bytes: u64 = cache.manifest().tensors.iter().map(|t| t.bytes).sum();
    assert_eq!(plan["bytes_after"], bytes);
    assert_eq!(
        cache.manifest().key.recipe,
        plan["recipe"].as_str().unwrap()
    );

    let status = json(&["status", "--json"]);
    let ready = &status["entries"][0]["ready"];
    assert_eq!(
        (ready["recipe"].as_str(), ready["dtype"].as_str()),
        (plan["recipe"].as_str(), Some("stored"))
    );

    // The same recipe in other words is held already; another one is not, and neither is none.
    let again = load(&["--quantize", recipe.to_str().unwrap()]);
    assert_eq!(again["result"], "already loaded");
    let allowed = load(&["--quantize", text, "--allow-nonfinite"]);
    assert_ne!(
        allowed["result"], "already loaded",
        "what was never allowed is not what was"
    );
    assert_eq!(load(&["--quantize", "q8_0"])["result"], "loaded");
    assert_eq!(load(&[])["result"], "loaded");

    for (args, wanted) in [
        (["--quantize", "q9k"], "no type `q9k`"),
        (
            ["--quantize", "lm_haed=q4k"],
            "`lm_haed=q4k` names no tensor",
        ),
        (["--quantize", "nowhere.toml"], "nowhere.toml"),
    ] {
        let output = daemon.run(&[&["load", path], &args[..]].concat());
        assert!(!output.status.success());
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(wanted), "{wanted}: {error}");
    }
}
