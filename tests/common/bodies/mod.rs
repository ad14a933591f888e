//! The tests that concern tensors, as bodies that run wherever the weights lie.
//! `each_body!` lists them once: tests/engine.rs runs the list on the host, tests/gpu.rs the same list on a GPU.

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Error, Tensor};
use candle_ipc_cache::manifest::ElementType;
use candle_ipc_cache::tensors::ggml_dtype;

use crate::stand_in::Model;

pub(crate) mod copies;
pub(crate) mod lifetime;
pub(crate) mod names;
pub(crate) mod quantized;
pub(crate) mod shards;
pub(crate) mod tensors;

/// Gives the list of bodies, by topic, to the macro `$tests`, which makes a test of each. A body that is missing here
/// is dead code to the compiler.
macro_rules! each_body {
    ($tests:ident) => {
        $tests! {
            tensors {
                every_dtype_that_candle_has_is_served_with_equal_bytes
                tensors_equal_those_that_candle_loads_from_the_same_safetensors_bytes
                large_tensors_arrive_whole_and_copies_are_counted
                scalars_and_empty_tensors_keep_their_shapes
                a_type_that_candle_lacks_is_refused_by_name_and_its_bytes_are_there
                names_that_share_weights_share_one_storage_in_every_dtype
                another_dtype_is_converted_as_candle_does_and_counted
                strict_serves_stored_dtypes_and_converts_nothing
                a_conversion_that_candle_lacks_names_the_tensor
                a_wrong_shape_is_candles_own_error_with_the_name
                verifying_names_the_tensor_whose_bytes_are_not_those_that_were_loaded
            }
            names {
                a_missing_name_is_candles_own_error_and_names_the_nearest_under_every_prefix
                a_misspelt_name_finds_its_neighbours_and_a_strange_one_finds_none
                a_missing_head_is_not_invented_and_the_error_mentions_the_tie
                small_files_and_attributes_come_back_byte_for_byte
            }
            quantized {
                quantized_tensors_over_mapped_memory_compute_exactly_as_candles_own
                two_requests_for_one_quantized_tensor_share_it_and_it_lies_in_the_mapping
                quantized_requests_are_checked_as_candle_checks_them
            }
            shards {
                a_whole_entry_serves_the_slices_of_every_rank
                a_rank_serves_its_own_slices_and_names_both_ranks_to_others
                names_that_share_weights_share_their_slices
                copied_weights_and_dequantized_blocks_are_sliced_too
            }
            copies {
                a_copy_says_goodbye_at_attach_and_outlives_the_daemon
                copied_tensors_equal_mapped_ones_in_every_type
                a_copied_quantized_tensor_computes_exactly_as_the_mapped_one
                each_copied_tensor_is_copied_once_and_every_later_copy_is_counted
                a_copy_of_damaged_memory_is_refused_where_verifying_was_asked_for
            }
            lifetime {
                tensors_outlive_the_handle_and_the_daemon
                detaching_says_goodbye_and_what_is_still_alive
                the_lease_lasts_as_long_as_a_tensor_reads_shared_memory
                one_line_gives_a_builder_that_holds_the_lease
                what_was_served_in_place_and_is_held_by_nobody_is_counted_as_let_go
                sixty_four_engines_attach_at_the_same_moment
            }
        }
    };
}
pub(crate) use each_body;

/// candle's error without the backtrace that RUST_BACKTRACE puts around it.
pub(crate) fn bare(error: Error) -> Error {
    match error {
        Error::WithBacktrace { inner, .. } => bare(*inner),
        other => other,
    }
}

/// Bytes without a pattern that a shifted or cut copy could share: the same for the same seed.
pub(crate) fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    hasher.finalize_xof().fill(&mut bytes);
    bytes
}

/// Bytes of a type in which every value is a usual number, so that equal values mean equal bytes.
pub(crate) fn values(element: ElementType, count: u64) -> Vec<u8> {
    let n = count as usize;
    match element {
        ElementType::F16 => (0..n)
            .flat_map(|i| half::f16::from_f32(i as f32 / 16.).to_le_bytes())
            .collect(),
        ElementType::BF16 => (0..n)
            .flat_map(|i| half::bf16::from_f32((i % 256) as f32).to_le_bytes())
            .collect(),
        ElementType::F32 => (0..n).flat_map(|i| (i as f32 / 3.).to_le_bytes()).collect(),
        ElementType::F64 => (0..n).flat_map(|i| (i as f64 / 3.).to_le_bytes()).collect(),
        _ => noise(
            (count / element.block_elements() * element.block_bytes()) as usize,
            count,
        ),
    }
}

/// A model of the one F32 tensor `a`.
pub(crate) fn one_tensor() -> Model {
    Model::new("m").floats("a", &[1], &[1.])
}

/// Values of `rows` times 512, on the CPU.
pub(crate) fn matrix(rows: usize) -> Tensor {
    let values = noise(rows * 512, 3);
    let values: Vec<f32> = values
        .iter()
        .map(|b| (f32::from(*b) - 128.) / 64.)
        .collect();
    Tensor::from_vec(values, (rows, 512), &Device::Cpu).unwrap()
}

/// The blocks that candle makes of a matrix.
pub(crate) fn blocks(dtype: GgmlDType, rows: usize) -> Vec<u8> {
    let tensor = QTensor::quantize(&matrix(rows), dtype).unwrap();
    tensor.data().unwrap().to_vec()
}

pub(crate) fn ggml_types() -> impl Iterator<Item = (ElementType, GgmlDType)> {
    ElementType::ALL
        .iter()
        .filter_map(|e| Some((*e, ggml_dtype(*e)?)))
}
