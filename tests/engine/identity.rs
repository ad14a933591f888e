//! Proof of identity: the checkpoint that an engine means, and the entry that it gets.

use std::path::Path;
use std::time::Duration;

use candle_core::Device;
use candle_ipc_cache::key::Receipt;
use candle_ipc_cache::manifest::Digest;
use candle_ipc_cache::{AttachError, IpcCache, Proof};

use crate::stand_in::{Model, StandIn};
use crate::{attach, refused};

/// A safetensors file of two tensors, and the model that a worker would make of it.
fn checkpoint_file(path: &Path, values: [f32; 3]) -> Model {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let view = |shape: Vec<usize>, bytes| {
        safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape, bytes).unwrap()
    };
    let file = safetensors::serialize(
        [
            ("a", view(vec![2], &bytes[..8])),
            ("b", view(vec![1], &bytes[8..])),
        ],
        None,
    )
    .unwrap();
    std::fs::write(path, file).unwrap();
    // A receipt taken in the tick of the write cannot vouch for the file.
    std::thread::sleep(Duration::from_millis(60));
    let mut model = Model::new("m").floats("a", &[2], &values[..2]);
    model = model.floats("b", &[1], &values[2..]);
    let open = std::fs::File::open(path).unwrap();
    model.sources = vec![Receipt::of(&open, path).unwrap()];
    model
}

fn touch(path: &Path) {
    let file = std::fs::File::options().append(true).open(path).unwrap();
    file.set_modified(std::time::SystemTime::now()).unwrap();
}

#[test]
fn a_file_rewritten_under_the_same_header_is_refused_and_one_only_touched_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let model = checkpoint_file(&path, [1., 2., 3.]);
    let daemon = StandIn::serving(model.build());
    assert_eq!(attach(&daemon).report().identity, Proof::SourcesUntouched);

    touch(&path);
    assert_eq!(attach(&daemon).report().identity, Proof::SourcesHashed);

    let length = std::fs::metadata(&path).unwrap().len();
    checkpoint_file(&path, [1., 2., 4.]);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), length);
    let error = refused(&daemon.config("m"));
    let text = error.to_string();
    assert!(
        matches!(&error, AttachError::Stale { file, .. } if *file == path),
        "{text}"
    );
    assert!(
        text.contains("tensor `b`") && !text.contains("tensor `a`"),
        "{text}"
    );
    let (old, new) = (
        Digest::of(&3f32.to_le_bytes()),
        Digest::of(&4f32.to_le_bytes()),
    );
    assert!(
        text.contains(&old.to_string()) && text.contains(&new.to_string()),
        "{text}"
    );
    assert!(text.contains("candle-cache load"), "{text}");

    let trusting = daemon.config("m").trust_name(true);
    let cache = IpcCache::attach(&trusting, &Device::Cpu).unwrap();
    assert_eq!(cache.report().identity, Proof::Trusted);

    std::fs::remove_file(&path).unwrap();
    assert_eq!(attach(&daemon).report().identity, Proof::NameOnly);
}

#[test]
fn a_file_cut_or_replaced_by_something_else_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let daemon = StandIn::serving(checkpoint_file(&path, [1., 2., 3.]).build());
    std::fs::write(&path, b"not a checkpoint").unwrap();
    let text = refused(&daemon.config("m")).to_string();
    assert!(
        text.contains("model.safetensors") && text.contains("trust_name"),
        "{text}"
    );
}

#[test]
fn the_checkpoint_that_an_engine_means_decides() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let daemon = StandIn::serving(checkpoint_file(&path, [1., 2., 3.]).build());
    let with = |path: &Path| daemon.config("m").checkpoint(path);
    let proof =
        |path: &Path| IpcCache::attach(&with(path), &Device::Cpu).map(|c| c.report().identity);
    assert_eq!(proof(&path).unwrap(), Proof::CheckpointUntouched);

    let copy = folder.path().join("copy.safetensors");
    std::fs::copy(&path, &copy).unwrap();
    assert_eq!(proof(&copy).unwrap(), Proof::CheckpointHashed);

    let other = folder.path().join("other.safetensors");
    checkpoint_file(&other, [9., 2., 3.]);
    let error = proof(&other).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, AttachError::Mismatch(_)), "{text}");
    assert!(
        text.contains("tensor `a`") && text.contains("other.safetensors"),
        "{text}"
    );

    let absent = proof(&folder.path().join("absent.safetensors")).unwrap_err();
    assert!(
        absent.to_string().contains("absent.safetensors"),
        "{absent}"
    );
}

#[test]
fn names_and_shapes_that_differ_are_listed_up_to_a_count() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    checkpoint_file(&path, [1., 2., 3.]);
    let mut model = Model::new("m").floats("a", &[1, 2], &[1., 2.]);
    for i in 0..20 {
        model = model.floats(&format!("extra.{i}"), &[1], &[0.]);
    }
    let daemon = StandIn::serving(model.build());
    let text = refused(&daemon.config("m").checkpoint(&path)).to_string();
    assert!(
        text.contains("wanted F32 [2], the cache holds F32 [1, 2]"),
        "{text}"
    );
    assert!(
        text.contains("tensor `b`: wanted F32 [1], the cache holds no such tensor"),
        "{text}"
    );
    assert!(text.contains("and 14 more"), "{text}");
}

#[test]
fn a_pinned_digest_accepts_these_weights_and_no_others() {
    let entry = Model::new("m").floats("a", &[1], &[1.]).build();
    let root = entry.manifest.root;
    let daemon = StandIn::serving(entry);
    let pinned = daemon.config("m").root(root);
    let cache = IpcCache::attach(&pinned, &Device::Cpu).unwrap();
    assert_eq!(cache.report().identity, Proof::Root);
    let other = Digest::of(b"other");
    let text = refused(&daemon.config("m").root(other)).to_string();
    assert!(
        text.contains(&other.to_string()) && text.contains(&root.to_string()),
        "{text}"
    );
}

#[test]
fn an_entry_that_was_loaded_under_another_name_is_refused() {
    let daemon = StandIn::serving(Model::new("other").floats("a", &[1], &[1.]).build());
    let text = refused(&daemon.config("m")).to_string();
    assert!(text.contains("wanted m, the cache holds other"), "{text}");
}
