//! Plain tensors over mapped slabs: values, lifetimes, and what a write does.

use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use candle_ipc_cache::tensors::cuda::sweep;
use candle_ipc_cache::tensors::{MappedWeights, device_id};

use crate::support::*;

#[test]
fn a_second_candle_device_on_the_gpu_takes_no_copy_either() {
    let Some((gpu, device, _alone)) = engine() else {
        return;
    };
    assert_eq!(device_id(&device).unwrap(), gpu.id);
    let (entry, wanted) = square(gpu.id, 64);
    let weights = entry.map(&device);
    let second = Device::new_cuda(0).unwrap();
    assert!(!second.same_device(&device));
    assert_eq!(values(&plain(&weights, 0, &second)), wanted);
    weights.verify().unwrap();
    drop(weights);
    assert_eq!(sweep().tensors, 0);
}

#[test]
fn tensors_outlive_their_handle_and_memory_goes_with_the_last() {
    let Some((gpu, first, _alone)) = engine() else {
        return;
    };
    for device in [first, Device::new_cuda_with_stream(0).unwrap()] {
        let (entry, wanted) = square(gpu.id, 2048);
        let held = Arc::new(());
        let weights = entry.try_map(&device, held.clone()).unwrap();
        drop(entry);
        let (a, b) = (plain(&weights, 0, &device), plain(&weights, 0, &device));
        assert_eq!(weights.sweep().tensors, 2);
        drop(weights);
        assert_eq!(
            Arc::strong_count(&held),
            2,
            "the lease ended while tensors live"
        );
        assert_eq!(sweep().tensors, 2);
        drop(a);
        assert_eq!(values(&b), wanted);
        let before = free(&gpu);
        std::thread::spawn(move || drop(b)).join().unwrap();
        let alive = sweep();
        assert_eq!((alive.tensors, alive.bytes), (0, 0));
        assert_eq!(Arc::strong_count(&held), 1, "the lease goes on");
        assert!(
            free_again(&gpu, before + (16 << 20)) >= before + (8 << 20),
            "the memory did not come back"
        );
    }
}

#[test]
fn work_that_is_queued_finishes_before_memory_goes() {
    let Some((gpu, first, _alone)) = engine() else {
        return;
    };
    for device in [first, Device::new_cuda_with_stream(0).unwrap()] {
        let n = 2048;
        let (entry, values_) = square(gpu.id, n);
        let own = Tensor::from_vec(values_, (n, n), &device).unwrap();
        let x = Tensor::from_vec(floats(256 * n, 3), (256, n), &device).unwrap();
        let chain = |w: &Tensor| {
            let mut y = x.clone();
            for _ in 0..100 {
                y = (y.matmul(w).unwrap() * 0.038).unwrap();
            }
            y
        };
        let wanted = values(&chain(&own));
        let weights = entry.map(&device);
        let tensor = plain(&weights, 0, &device);
        let got = chain(&tensor);
        // Nothing waits here but the sweep.
        drop((tensor, weights));
        assert_eq!(sweep().tensors, 0);
        assert_eq!(values(&got), wanted);
    }
}

#[test]
fn dropping_tensors_disturbs_neither_siblings_nor_candle() {
    let Some((gpu, device, _alone)) = engine() else {
        return;
    };
    let (entry, wanted) = square(gpu.id, 256);
    let weights = entry.map(&device);
    let start = Instant::now();
    let many: Vec<Tensor> = (0..10_000).map(|_| plain(&weights, 0, &device)).collect();
    println!("10,000 tensors in {:?}", start.elapsed());
    let keep = many[5000].clone();
    drop(many);
    assert_eq!(weights.sweep().tensors, 1);
    assert_eq!(values(&keep), wanted);
    assert_eq!(values(&keep.copy().unwrap()), wanted);
    assert_eq!(values(&keep.to_device(&Device::Cpu).unwrap()), wanted);
    let sum = Tensor::ones((4,), DType::F32, &device)
        .unwrap()
        .sum_all()
        .unwrap();
    assert_eq!(sum.to_scalar::<f32>().unwrap(), 4.0);
    device.synchronize().unwrap();
}

#[test]
fn a_thousand_attachments_leave_nothing_behind() {
    let Some((gpu, device, _alone)) = engine() else {
        return;
    };
    let (entry, wanted) = square(gpu.id, 512);
    let x = Tensor::from_vec(floats(512, 8), (1, 512), &device).unwrap();
    let own = Tensor::from_vec(wanted, (512, 512), &device).unwrap();
    let answer = values(&x.matmul(&own).unwrap());
    let round = || {
        let weights = entry.map(&device);
        let tensor = plain(&weights, 0, &device);
        let y = x.matmul(&tensor).unwrap();
        drop((tensor, weights));
        assert_eq!(values(&y), answer);
    };
    round();
    let (before, open) = (free(&gpu), descriptors());
    let start = Instant::now();
    (0..1000).for_each(|_| round());
    println!("1,000 rounds in {:?}", start.elapsed());
    assert_eq!(sweep().tensors, 0);
    assert!(descriptors() <= open);
    let after = free_again(&gpu, before);
    assert!(
        after + (8 << 20) >= before,
        "free before {before}, after {after}"
    );
}

#[test]
fn a_copy_of_ones_own_lets_the_weights_go() {
    let Some((gpu, device, _alone)) = engine() else {
        return;
    };
    let (entry, wanted) = square(gpu.id, 256);
    let weights = entry.map(&device);
    let copy = weights.copied(0, &device).unwrap();
    device.synchronize().unwrap();
    drop(weights);
    assert_eq!(sweep().tensors, 0);
    assert_eq!(values(&copy), wanted);
    assert_eq!(values(&copy.copy().unwrap()), wanted);
}

#[test]
fn a_write_to_a_weight_is_fatal_to_the_writer_alone() {
    let Some((gpu, device, _alone)) = engine() else {
        return;
    };
    let (entry, wanted) = square(gpu.id, 64);
    let weights = entry.map(&device);
    let tensor = plain(&weights, 0, &device);
    let (mut offender, connection) = child("write", None);
    send(&connection, &entry.manifest.slabs, &entry.export.slabs);
    let (refused, _) = connection.receive::<bool>(PATIENCE).unwrap();
    assert!(refused, "the GPU let a mapped weight be written");
    offender.wait().unwrap();
    assert_eq!(values(&tensor), wanted);
    let doubled = (&tensor * 2.0).unwrap();
    assert_eq!(
        values(&doubled),
        wanted.iter().map(|v| v * 2.0).collect::<Vec<_>>()
    );
}
