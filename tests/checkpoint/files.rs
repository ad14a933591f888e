//! What the system does with files: it refuses them, cuts them, changes them, or has something else there.
//! And the small files beside the weights.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use candle_ipc_cache::checkpoint::CheckpointError;
use rustix::process::{Resource, getrlimit, setrlimit};
use serde_json::json;

use crate::{again, bytes_of, open, tensors};

#[test]
fn a_file_without_permission_is_named_with_its_mode_and_owner() {
    use std::os::unix::fs::PermissionsExt;
    const ASK: &str = "CHECKPOINT_TEST_DENIED";
    let check = |dir: &Path| {
        let file = open(&dir.join("model.safetensors")).expect_err("denied");
        assert!(matches!(file, CheckpointError::Denied { .. }), "{file}");
        let file = file.to_string();
        assert!(file.contains("model.safetensors"), "{file}");
        assert!(file.contains("mode 0000") && file.contains("uid"), "{file}");
        let inside = open(&dir.join("shut/model.safetensors"))
            .expect_err("denied")
            .to_string();
        assert!(inside.contains("shut has mode 0000"), "{inside}");
        let folder = open(&dir.join("shut")).expect_err("denied").to_string();
        assert!(folder.contains("shut has mode 0000"), "{folder}");
    };
    if let Some(dir) = std::env::var_os(ASK) {
        return check(Path::new(&dir));
    }
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("model.safetensors");
    let shut = dir.path().join("shut");
    std::fs::write(&file, tensors(&[("a", &[1])])).expect("written");
    std::fs::create_dir(&shut).expect("made");
    std::fs::copy(&file, shut.join("model.safetensors")).expect("copied");
    let mode = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("chmod")
    };
    mode(&file, 0);
    mode(&shut, 0);
    if std::fs::File::open(&file).is_err() {
        check(dir.path());
    } else {
        // Root may read anything, until it gives the capabilities up that say so.
        let caps = "-dac_override,-dac_read_search";
        let mut child = Command::new("setpriv");
        child
            .arg(format!("--bounding-set={caps}"))
            .arg(format!("--inh-caps={caps}"));
        child.arg(std::env::current_exe().expect("this program"));
        again(
            child,
            "files::a_file_without_permission_is_named_with_its_mode_and_owner",
            ASK,
            dir.path(),
        );
    }
    mode(&shut, 0o700);
}

#[test]
fn a_file_that_shrinks_between_open_and_read_is_an_error_with_both_sizes() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("model.safetensors");
    std::fs::write(&path, tensors(&[("a", &[1; 1000]), ("b", &[2; 1000])])).expect("written");
    let c = open(&path).expect("opens");
    let whole = c.files[0].receipt.bytes;
    let file = std::fs::File::options()
        .write(true)
        .open(&path)
        .expect("opens");
    file.set_len(whole - 500).expect("cut");
    assert_eq!(bytes_of(&c, "a"), [1; 1000]);
    let b = &c.tensors[1];
    let e = c.read_at(b, 0, &mut [0; 1000]).expect_err("cut");
    assert!(
        matches!(&e, CheckpointError::Shrunk { tensor, found, wanted, .. }
            if tensor == "b" && *found == whole - 500 && *wanted == whole),
        "{e}"
    );
    let text = e.to_string();
    assert!(
        text.contains("model.safetensors") && text.contains("shorter while it was read"),
        "{text}"
    );
    assert!(c.digest(b).is_err());
    let e = c.check_unchanged().expect_err("cut").to_string();
    assert!(
        e.contains(&format!("{whole} bytes, now {}", whole - 500)),
        "{e}"
    );
}

#[test]
fn a_file_that_is_written_after_it_was_opened_has_changed() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("model.safetensors");
    std::fs::write(&path, tensors(&[("a", &[1; 1000])])).expect("written");
    let c = open(&path).expect("opens");
    c.check_unchanged().expect("nobody wrote");
    // The clock that stamps files ticks every few milliseconds.
    std::thread::sleep(Duration::from_millis(50));
    std::fs::write(&path, tensors(&[("a", &[2; 1000])])).expect("written");
    let e = c.check_unchanged().expect_err("changed");
    assert!(matches!(e, CheckpointError::Changed { .. }), "{e}");
    assert!(e.to_string().contains("model.safetensors"), "{e}");
}

#[test]
fn a_path_that_is_replaced_does_not_change_what_was_opened() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("model.safetensors");
    std::fs::write(&path, tensors(&[("a", &[1; 1000])])).expect("written");
    let c = open(&path).expect("opens");
    std::thread::sleep(Duration::from_millis(50));
    let other = dir.path().join("other");
    std::fs::write(&other, tensors(&[("a", &[2; 1000])])).expect("written");
    std::fs::rename(&other, &path).expect("renamed");
    c.check_unchanged().expect("the open file is the old one");
    assert_eq!(bytes_of(&c, "a"), [1; 1000]);
}

#[test]
fn pipes_sockets_devices_and_folders_are_refused_without_waiting() {
    let dir = tempfile::tempdir().expect("a folder");
    let pipe = dir.path().join("pipe.safetensors");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0)
        .expect("a pipe");
    let socket = dir.path().join("socket.gguf");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
    let device = dir.path().join("null.gguf");
    std::os::unix::fs::symlink("/dev/null", &device).expect("a link");
    for (path, kind) in [
        (&pipe, "a pipe"),
        (&socket, "a socket"),
        (&device, "a device"),
    ] {
        let e = open(path).expect_err("refused");
        assert!(matches!(e, CheckpointError::NotAFile { .. }), "{e}");
        assert!(e.to_string().contains(kind), "{e}");
    }
    // As part of a folder: weights are refused, a small file is left out.
    let model = dir.path().join("m");
    std::fs::create_dir(&model).expect("made");
    std::fs::rename(&pipe, model.join("config.json")).expect("moved");
    std::fs::write(model.join("model.safetensors"), tensors(&[("a", &[1])])).expect("written");
    assert!(open(&model).expect("opens").small_files.is_empty());
    std::fs::rename(model.join("config.json"), model.join("model.safetensors")).expect("moved");
    assert!(
        open(&model)
            .expect_err("refused")
            .to_string()
            .contains("a pipe")
    );
    std::fs::remove_file(model.join("model.safetensors")).expect("removed");
    std::fs::create_dir(model.join("model-00001-of-00001.safetensors")).expect("made");
    let index = json!({"weight_map": {"a": "model-00001-of-00001.safetensors"}}).to_string();
    std::fs::write(model.join("model.safetensors.index.json"), index).expect("written");
    assert!(
        open(&model)
            .expect_err("refused")
            .to_string()
            .contains("a folder")
    );
}

#[test]
fn a_folder_of_ten_thousand_files_is_opened_and_only_some_small_files_travel() {
    let dir = tempfile::tempdir().expect("a folder");
    for i in 0..10_000 {
        let ending = ["json", "txt", "safetensors.tmp", "log"][i % 4];
        std::fs::write(dir.path().join(format!("{i:05}.{ending}")), [b'x'; 10]).expect("written");
    }
    std::fs::write(dir.path().join("tokenizer.json"), "{}").expect("written");
    std::fs::write(
        dir.path().join("model.safetensors"),
        tensors(&[("a", &[1])]),
    )
    .expect("written");
    let c = open(dir.path()).expect("opens");
    assert_eq!(c.tensors.len(), 1);
    assert_eq!(c.small_files.len(), 256);
    assert!(c.small_files.iter().any(|(n, _)| n == "tokenizer.json"));
    let alone = open(&dir.path().join("model.safetensors")).expect("opens");
    let names: Vec<_> = alone.small_files.iter().map(|(n, _)| n.as_str()).collect();
    assert_eq!(names, ["tokenizer.json"]);
}

#[test]
fn a_small_file_over_its_limit_is_left_out_and_the_model_loads() {
    let dir = tempfile::tempdir().expect("a folder");
    let large = std::fs::File::create(dir.path().join("large.json")).expect("made");
    large.set_len((64 << 20) + 1).expect("sparse");
    for i in 0..9 {
        let file = std::fs::File::create(dir.path().join(format!("{i}.txt"))).expect("made");
        file.set_len(64 << 20).expect("sparse");
    }
    std::fs::write(
        dir.path().join("model.safetensors"),
        tensors(&[("a", &[1])]),
    )
    .expect("written");
    let c = open(dir.path()).expect("opens");
    let total: usize = c.small_files.iter().map(|(_, b)| b.len()).sum();
    assert_eq!((c.small_files.len(), total), (8, 512 << 20));
}

#[test]
fn more_shards_than_descriptors_is_an_error_with_the_limit() {
    const ASK: &str = "CHECKPOINT_TEST_DESCRIPTORS";
    if let Some(dir) = std::env::var_os(ASK) {
        let mut limit = getrlimit(Resource::Nofile);
        limit.current = Some(40);
        setrlimit(Resource::Nofile, limit).expect("lowered");
        let e = open(Path::new(&dir)).expect_err("too many");
        assert!(
            matches!(e, CheckpointError::Descriptors { limit: 40, .. }),
            "{e}"
        );
        assert!(e.to_string().contains("ulimit -n"), "{e}");
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let mut map = serde_json::Map::new();
    for i in 0..60 {
        let (name, shard) = (format!("t{i}"), format!("{i:02}.safetensors"));
        std::fs::write(dir.path().join(&shard), tensors(&[(&name, &[1])])).expect("written");
        map.insert(name, json!(shard));
    }
    let index = json!({"weight_map": map}).to_string();
    std::fs::write(dir.path().join("model.safetensors.index.json"), index).expect("written");
    assert_eq!(open(dir.path()).expect("opens").files.len(), 60);
    let child = Command::new(std::env::current_exe().expect("this program"));
    let test = "files::more_shards_than_descriptors_is_an_error_with_the_limit";
    again(child, test, ASK, dir.path());
}

#[test]
fn a_link_that_leads_nowhere_says_where() {
    let dir = tempfile::tempdir().expect("a folder");
    let link = dir.path().join("model.safetensors");
    std::os::unix::fs::symlink("../blobs/abc", &link).expect("a link");
    for path in [dir.path(), &link] {
        let e = open(path).expect_err("nowhere").to_string();
        assert!(
            e.contains("model.safetensors is a link to ../blobs/abc"),
            "{e}"
        );
    }
}
