//! GGML's numbering of tensor types, and which of them candle has.
//! Numbers and names: ggml.h.

use crate::manifest::ElementType;

/// Types by number; a type that GGML removed keeps its number and its name.
const NAMES: [&str; 42] = [
    "F32",
    "F16",
    "Q4_0",
    "Q4_1",
    "Q4_2",
    "Q4_3",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q8_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q8_K",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ3_XXS",
    "IQ1_S",
    "IQ4_NL",
    "IQ3_S",
    "IQ2_S",
    "IQ4_XS",
    "I8",
    "I16",
    "I32",
    "I64",
    "F64",
    "IQ1_M",
    "BF16",
    "Q4_0_4_4",
    "Q4_0_4_8",
    "Q4_0_8_8",
    "TQ1_0",
    "TQ2_0",
    "IQ4_NL_4_4",
    "IQ4_NL_4_8",
    "IQ4_NL_8_8",
    "MXFP4",
    "NVFP4",
    "Q1_0",
];

/// The type's name; `unknown type` for a number that GGML had not given out when this was written.
pub(in crate::checkpoint) fn name(number: u32) -> &'static str {
    NAMES
        .get(number as usize)
        .copied()
        .unwrap_or("unknown type")
}

/// The type as candle has it.
pub(super) fn element(number: u32) -> Option<ElementType> {
    Some(match number {
        0 => ElementType::F32,
        1 => ElementType::F16,
        2 => ElementType::Q4_0,
        3 => ElementType::Q4_1,
        6 => ElementType::Q5_0,
        7 => ElementType::Q5_1,
        8 => ElementType::Q8_0,
        9 => ElementType::Q8_1,
        10 => ElementType::Q2K,
        11 => ElementType::Q3K,
        12 => ElementType::Q4K,
        13 => ElementType::Q5K,
        14 => ElementType::Q6K,
        15 => ElementType::Q8K,
        30 => ElementType::BF16,
        _ => return None,
    })
}

/// The names of the types that work, for messages.
pub(in crate::checkpoint) fn working() -> String {
    let names: Vec<_> = (0..NAMES.len() as u32)
        .filter_map(element)
        .map(ElementType::as_str)
        .collect();
    names.join(", ")
}
