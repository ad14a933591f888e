//! Engines on a GPU, through a real daemon: attach, copy, hand off, and give memory back when asked.

use std::os::fd::AsFd;
use std::path::Path;

use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Device, Module, Tensor};
use candle_ipc_cache::daemon::{self, Config, Listener};
use candle_ipc_cache::manifest::ElementType;
use candle_ipc_cache::protocol::{EntryId, Refusal, Reply, Request};
use candle_ipc_cache::slab::host;
use candle_ipc_cache::socket::Connection;
use candle_ipc_cache::{AttachError, GetError, HandOff, IpcCache, IpcConfig};

use crate::support::*;

/// A daemon in a thread, which stops when the sender is dropped.
struct Daemon {
    folder: tempfile::TempDir,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Daemon {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = Listener::bind(&folder.path().join("daemon.sock")).unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .unwrap();
            let shutdown = async {
                let _ = stopped.await;
            };
            let serving = daemon::run(listener, Config::default(), shutdown);
            runtime.block_on(serving).unwrap();
        });
        Self {
            folder,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    fn config(&self) -> IpcConfig {
        IpcConfig::new("test").socket_dir(self.folder.path())
    }

    fn connect(&self) -> Connection {
        let socket: &Path = &self.folder.path().join("daemon.sock");
        Connection::connect(socket, PATIENCE).unwrap()
    }

    fn ask(&self, connection: &Connection, request: &Request) -> Reply {
        connection.send(request, &[], PATIENCE).unwrap();
        connection.receive(PATIENCE).unwrap().0
    }

    /// Hands the entry over: nothing of it stays in this process.
    fn publish(&self, entry: Entry) {
        let connection = self.connect();
        let announce = Request::Announce {
            entry: EntryId::new("test", entry.export.device),
            bytes: entry.manifest.memory_bytes(),
            set: Vec::new(),
        };
        assert_eq!(self.ask(&connection, &announce), Reply::Done);
        let mut manifest = (*entry.manifest).clone();
        let manifest = host::sealed("manifest", &manifest.encode(Vec::new()).unwrap()).unwrap();
        let mut fds = vec![manifest.as_fd()];
        fds.extend(entry.export.anchor.iter().map(AsFd::as_fd));
        fds.extend(entry.export.slabs.iter().map(AsFd::as_fd));
        let offer = Request::Offer {
            anchor: entry.export.anchor.is_some(),
            slabs: entry.export.slabs.len() as u32,
        };
        connection.send(&offer, &fds, PATIENCE).unwrap();
        let reply = connection.receive::<Reply>(PATIENCE).unwrap().0;
        assert!(matches!(reply, Reply::Accepted { .. }), "{reply:?}");
    }

    /// Leases on the one entry; `None` where there is no entry.
    fn leases(&self) -> Option<u64> {
        match self.ask(&self.connect(), &Request::Status { after: None }) {
            Reply::Status { entries, .. } => Some(entries.first()?.ready.as_ref()?.leases),
            other => panic!("{other:?}"),
        }
    }

    fn unload(&self) -> Reply {
        let unload = Request::Unload {
            name: "test".into(),
            role: None,
            device: None,
            shard: None,
            epoch: None,
            force: false,
        };
        self.ask(&self.connect(), &unload)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(std::thread::panicking() || ended.is_ok());
        }
    }
}

fn matrix(cache: &IpcCache, n: usize) -> Tensor {
    let vb = cache.var_builder(DType::F32);
    vb.get((n, n), "w").unwrap()
}

#[test]
fn an_engine_that_dropped_its_model_gives_its_memory_back_when_the_daemon_asks() {
    let Some((gpu, device, _alone)) = engine() else {
        return;
    };
    let before = free(&gpu);
    let (entry, wanted) = square(gpu.id, 4096);
    let bytes = entry.manifest.memory_bytes();
    let daemon = Daemon::start();
    daemon.publish(entry);
    assert_eq!(
        IpcCache::memory_bytes_of(&daemon.config(), &device).unwrap(),
        bytes
    );
    let cache = IpcCache::attach(&daemon.config().verify(true), &device).unwrap();
    assert_eq!(cache.memory_bytes(), bytes);
    assert!(matches!(cache.raw("w"), Err(GetError::NotReadable { .. })));
    let model = matrix(&cache, 4096);
    assert_eq!(cache.report().copied_bytes, 0);
    drop(cache);
    // The model holds the weights, and nobody hears of its end.
    assert!(matches!(
        daemon.unload(),
        Reply::Refused {
            code: Refusal::InUse,
            ..
        }
    ));
    assert_eq!(values(&model), wanted);
    drop(model);
    assert_eq!(daemon.leases(), Some(1));
    assert_eq!(daemon.unload(), Reply::Done);
    assert_eq!(daemon.leases(), None);
    let after = free_again(&gpu, before);
    assert!(after + (16 << 20) >= before, "{before} free, then {after}");
}

#[test]
fn a_handed_off_copy_equals_the_weights_and_the_daemon_keeps_nothing() {
    let Some((gpu, device, _alone)) = engine() else {
        return;
    };
    let dense = floats(256 * 256, 1);
    let source = Tensor::from_vec(floats(64 * 256, 2), (64, 256), &Device::Cpu).unwrap();
    let theirs = QTensor::quantize(&source, GgmlDType::Q4_0).unwrap();
    let blocks = theirs.data().unwrap().into_owned();
    let contents: [Content; 4] = [
        (
            "ids",
            ElementType::U16,
            &[4],
            vec![1, 0, 2, 0, 3, 1, 255, 255],
        ),
        ("lacking", ElementType::I8, &[3], vec![1, 2, 3]),
        ("q", ElementType::Q4_0, &[64, 256], blocks.clone()),
        ("w", ElementType::F32, &[256, 256], bytes_of_floats(&dense)),
    ];
    let daemon = Daemon::start();
    daemon.publish(entry(gpu.id, &contents));
    let cache = IpcCache::attach(&daemon.config().hand_off(true), &device).unwrap();
    let report = cache.report();
    assert_eq!(report.hand_off, Some(HandOff::Unloaded));
    assert_eq!(daemon.leases(), None);
    // Not the one that candle has no tensor for.
    let copied = 8 + blocks.len() + 4 * dense.len();
    assert_eq!(report.copied_bytes, copied as u64);

    assert_eq!(values(&matrix(&cache, 256)), dense);
    let ids = cache.var_builder(DType::U32).get(4, "ids").unwrap();
    assert_eq!(ids.to_vec1::<u32>().unwrap(), [1, 2, 259, 65535]);
    let ours = cache.quantized().get((64, 256), "q").unwrap();
    assert_eq!(ours.data().unwrap(), blocks);
    let x = Tensor::from_vec(floats(8 * 256, 3), (8, 256), &device).unwrap();
    let own = candle_core::quantized::QStorage::from_data(
        theirs.data().unwrap(),
        &device,
        GgmlDType::Q4_0,
    )
    .and_then(|storage| QTensor::new(storage, (64, 256)))
    .unwrap();
    let product = |weight| QMatMul::from_qtensor(weight).unwrap().forward(&x).unwrap();
    let mapped = QMatMul::from_arc(ours).unwrap().forward(&x).unwrap();
    assert_eq!(values(&mapped), values(&product(own)));
    // A copy is the engine's own: it may be written to.
    let tensor = matrix(&cache, 256);
    tensor.zero_set().unwrap();
    assert_eq!(values(&tensor), vec![0.0; dense.len()]);
}

#[test]
fn an_engine_on_other_memory_is_told_where_the_entry_is() {
    let Some((gpu, _device, _alone)) = engine() else {
        return;
    };
    let daemon = Daemon::start();
    daemon.publish(square(gpu.id, 64).0);
    let sizes = IpcCache::memory_bytes_of(&daemon.config(), &Device::Cpu).unwrap_err();
    let attach = IpcCache::attach(&daemon.config(), &Device::Cpu).unwrap_err();
    for error in [sizes, attach] {
        let text = error.to_string();
        assert!(
            text.contains("on host") && text.contains(&gpu.id.to_string()),
            "{text}"
        );
        assert!(matches!(
            error,
            AttachError::Refused {
                code: Refusal::OtherDevice,
                ..
            }
        ));
    }
}
