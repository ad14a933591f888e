//! Slabs alone: filled, exported, imported, here and in other processes. Needs the driver only.

use std::os::unix::process::ExitStatusExt;

use candle_ipc_cache::manifest::Digest;
use candle_ipc_cache::slab::cuda::{CudaError, GRANULARITY, find, gpus, resolve};
use candle_ipc_cache::slab::{self, CHUNK, DeviceId, SlabError, host};

use crate::support::*;

#[test]
fn a_gpu_that_is_not_there_is_an_error_that_says_what_is() {
    let error = resolve("cuda:99").unwrap_err();
    let text = error.to_string();
    match error {
        CudaError::NoDriver { .. } => {
            assert!(text.contains("no NVIDIA driver was found"), "{text}")
        }
        CudaError::NoSuchGpu { visible, .. } => {
            assert!(
                text.contains("cuda:99") && text.contains("CUDA_VISIBLE_DEVICES"),
                "{text}"
            );
            for gpu in visible.gpus {
                assert!(
                    text.contains(&gpu.name) && text.contains(&gpu.id.to_string()),
                    "{text}"
                );
            }
        }
        other => panic!("{other}"),
    }
    println!("{text}");
}

#[test]
fn a_gpu_answers_to_its_number_and_to_its_uuid() {
    let Some((gpu, _alone)) = gpu() else { return };
    println!("{gpu}, free {:?}", gpu.memory().unwrap());
    assert_eq!(resolve("cuda").unwrap(), gpu);
    assert_eq!(resolve("cuda:0").unwrap(), gpu);
    assert_eq!(resolve(&gpu.id.to_string()).unwrap(), gpu);
    assert_eq!(find(gpu.id).unwrap(), gpu);
    assert_eq!(slab::resolve("cuda:0").unwrap(), gpu.id);
    assert_eq!(slab::resolve("host").unwrap(), DeviceId::Host);
    assert!(matches!(resolve("GPU-0"), Err(CudaError::NoSuchGpu { .. })));
    gpu.check_support().unwrap();
    gpu.anchor().unwrap();
}

#[test]
fn slabs_come_back_as_they_were_written_with_zeros_behind() {
    let Some((gpu, _alone)) = gpu() else { return };
    let before = free(&gpu);
    let contents = [
        noise(5 * CHUNK + 12345, 1),
        noise(1, 2),
        noise(GRANULARITY as usize, 3),
    ];
    let export = export(gpu.id, &contents);
    assert_eq!(export.device, gpu.id);
    assert!(export.anchor.is_some());
    let lengths: Vec<u64> = contents.iter().map(|c| padded(c.len() as u64)).collect();
    let mapping = map(&gpu, &export.slabs, &lengths).unwrap();
    assert_eq!(mapping.bytes(), lengths.iter().sum::<u64>());
    for (i, content) in contents.iter().enumerate() {
        let got = read(&mapping, i, lengths[i]);
        assert!(got.starts_with(content), "slab {i} differs");
        assert!(
            got[content.len()..].iter().all(|b| *b == 0),
            "slab {i} has no zeros behind"
        );
    }
    assert!(matches!(
        mapping.address(0, lengths[0], 1),
        Err(SlabError::OutOfRange { .. })
    ));
    assert!(matches!(
        mapping.address(3, 0, 1),
        Err(SlabError::OutOfRange { .. })
    ));
    mapping.unmap().unwrap();
    drop(export);
    let after = free_again(&gpu, before);
    assert!(
        after + (24 << 20) >= before,
        "free before {before}, after {after}"
    );
}

#[test]
fn memory_outlives_the_process_that_filled_it() {
    let Some((gpu, _alone)) = gpu() else { return };
    let (mut filler, connection) = child("fill", None);
    let (lengths, fds) = receive(&connection);
    filler.kill().unwrap();
    assert_eq!(filler.wait().unwrap().signal(), Some(9));
    let mapping = map(&gpu, &fds[..1], &lengths).unwrap();
    let got = read(&mapping, 0, lengths[0]);
    assert!(got.starts_with(&noise(3 * CHUNK + 5, 77)));
    mapping.unmap().unwrap();
    // Another process, at the same time as a second mapping here.
    let (mut reader, connection) = child("read", None);
    send(&connection, &lengths, &fds[..1]);
    let (digests, _) = connection.receive::<Vec<String>>(PATIENCE).unwrap();
    assert_eq!(digests, [Digest::of(&got).to_string()]);
    assert!(reader.wait().unwrap().success());
}

#[test]
fn a_slab_of_another_length_than_the_manifests_is_refused() {
    let Some((gpu, _alone)) = gpu() else { return };
    let export = export(gpu.id, &[noise(2 * GRANULARITY as usize, 4)]);
    for lied in [GRANULARITY, 3 * GRANULARITY, 64 * GRANULARITY] {
        let refused = map(&gpu, &export.slabs, &[lied]).unwrap_err();
        println!("{refused}");
        let SlabError::Cuda(e) = &refused else {
            panic!("{refused}")
        };
        assert!(matches!(**e, CudaError::WrongSize { .. }), "{refused}");
    }
    for lied in [0, GRANULARITY + 1] {
        let refused = map(&gpu, &export.slabs, &[lied]).unwrap_err();
        let SlabError::Cuda(e) = &refused else {
            panic!("{refused}")
        };
        assert!(matches!(**e, CudaError::Length { .. }), "{refused}");
    }
    map(&gpu, &export.slabs, &[2 * GRANULARITY])
        .unwrap()
        .unmap()
        .unwrap();
}

#[test]
fn what_is_no_slab_is_refused_and_leaks_nothing() {
    let Some((gpu, _alone)) = gpu() else { return };
    let file = host::sealed("no slab", &noise(64, 5)).unwrap();
    let (open, before) = (descriptors(), free(&gpu));
    for _ in 0..20 {
        let refused = map(&gpu, &[file.try_clone().unwrap()], &[GRANULARITY]).unwrap_err();
        assert!(matches!(refused, SlabError::Cuda(_)), "{refused}");
    }
    assert!(descriptors() <= open);
    assert!(free_again(&gpu, before) + (64 << 20) >= before);
}

#[test]
fn what_does_not_fit_is_said_before_anything_is_taken() {
    let Some((gpu, _alone)) = gpu() else { return };
    let (free, total) = gpu.memory().unwrap();
    let wanted = padded(total) + GRANULARITY;
    let refused = slab::writer(gpu.id, &[wanted]).err().unwrap().to_string();
    println!("{refused}");
    assert!(
        refused.contains(&wanted.to_string()) && refused.contains(&total.to_string()),
        "{refused}"
    );
    let refused = slab::writer(gpu.id, &[GRANULARITY - 1])
        .err()
        .unwrap()
        .to_string();
    assert!(refused.contains("multiple"), "{refused}");
    // A GPU of no machine.
    let refused = slab::writer(DeviceId::Cuda([7; 16]), &[GRANULARITY])
        .err()
        .unwrap()
        .to_string();
    assert!(
        refused.contains("07070707") && refused.contains(&gpu.id.to_string()),
        "{refused}"
    );
    assert!(free_again(&gpu, free) + (64 << 20) >= free);
}

#[test]
fn a_writer_that_is_given_up_gives_its_memory_back() {
    let Some((gpu, _alone)) = gpu() else { return };
    let (before, open) = (free(&gpu), descriptors());
    for seed in 0..10 {
        let writer = slab::writer(gpu.id, &[64 * GRANULARITY]).unwrap();
        let mut lane = writer.lane().unwrap();
        for i in 0..4 {
            let piece = noise(CHUNK, seed);
            lane.buffer().unwrap().copy_from_slice(&piece);
            lane.send(CHUNK, 0, i * CHUNK as u64).unwrap();
        }
        assert!(matches!(
            lane.send(1, 0, 64 * GRANULARITY),
            Err(SlabError::OutOfRange { .. })
        ));
        assert!(matches!(
            lane.send(1, 1, 0),
            Err(SlabError::OutOfRange { .. })
        ));
    }
    assert!(descriptors() <= open);
    let after = free_again(&gpu, before);
    assert!(
        after + (64 << 20) >= before,
        "free before {before}, after {after}"
    );
}

#[test]
fn memory_of_another_gpu_is_refused_under_every_numbering() {
    let Some((first, _alone)) = gpu() else { return };
    let gpus = gpus().unwrap();
    let Some(second) = gpus.get(1) else {
        println!("skipped: one GPU");
        return;
    };
    let export = export(first.id, &[noise(1000, 6)]);
    let refused = map(second, &export.slabs, &[GRANULARITY])
        .unwrap_err()
        .to_string();
    println!("{refused}");
    assert!(
        refused.contains(&first.id.to_string()) && refused.contains(&second.id.to_string()),
        "{refused}"
    );
    for (visible, mapped) in [("0,1", true), ("1,0", false), ("1", false)] {
        let (mut other, connection) = child("elsewhere", Some(visible));
        send(&connection, &[GRANULARITY], &export.slabs);
        let ((seen, answer), _) = connection
            .receive::<(Vec<String>, String)>(PATIENCE)
            .unwrap();
        println!("CUDA_VISIBLE_DEVICES={visible}: sees {seen:?}: {answer}");
        let wanted = if mapped { first.id } else { second.id };
        assert_eq!(seen[0], wanted.to_string());
        assert_eq!(answer == "mapped", mapped, "{answer}");
        assert!(other.wait().unwrap().success());
    }
}
