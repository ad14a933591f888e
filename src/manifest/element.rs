//! How a tensor's elements are stored: the dtypes of safetensors and the block types of GGML, with their sizes.
//! candle's own dtypes are matched with these in `tensors`; the daemon needs the sizes alone.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! element_types {
    ($($(#[$doc:meta])* $name:ident, $text:literal, $elements:literal, $bytes:literal, $ggml:literal;)*) => {
        /// How a tensor's elements are stored: a safetensors dtype or a GGML block type.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
        #[allow(non_camel_case_types)]
        #[non_exhaustive]
        pub enum ElementType { $($(#[$doc])* $name,)* }

        impl ElementType {
            /// Every type, in the order of their declaration.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// The type's name, as safetensors or GGML spell it.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text),* }
            }

            /// Elements in one block; 1 for a plain dtype of whole bytes.
            pub fn block_elements(self) -> u64 {
                match self { $(Self::$name => $elements),* }
            }

            /// Bytes of one block.
            pub fn block_bytes(self) -> u64 {
                match self { $(Self::$name => $bytes),* }
            }

            /// Whether this is a GGML block type, readable as a `QTensor` only.
            pub fn is_quantized(self) -> bool {
                match self { $(Self::$name => $ggml),* }
            }
        }
    };
}

element_types! {
    /// One byte, 0 or 1.
    Bool, "BOOL", 1, 1, false;
    /// Unsigned 8 bits.
    U8, "U8", 1, 1, false;
    /// Signed 8 bits.
    I8, "I8", 1, 1, false;
    /// Signed 16 bits.
    I16, "I16", 1, 2, false;
    /// Unsigned 16 bits.
    U16, "U16", 1, 2, false;
    /// Signed 32 bits.
    I32, "I32", 1, 4, false;
    /// Unsigned 32 bits.
    U32, "U32", 1, 4, false;
    /// Signed 64 bits.
    I64, "I64", 1, 8, false;
    /// Unsigned 64 bits.
    U64, "U64", 1, 8, false;
    /// 4-bit float, two to a byte.
    F4, "F4", 2, 1, false;
    /// 6-bit float, 2 exponent bits, four to three bytes.
    F6E2M3, "F6_E2M3", 4, 3, false;
    /// 6-bit float, 3 exponent bits, four to three bytes.
    F6E3M2, "F6_E3M2", 4, 3, false;
    /// 8-bit float, 4 exponent bits.
    F8E4M3, "F8_E4M3", 1, 1, false;
    /// 8-bit float, 5 exponent bits.
    F8E5M2, "F8_E5M2", 1, 1, false;
    /// 8-bit exponent.
    F8E8M0, "F8_E8M0", 1, 1, false;
    /// bfloat16.
    BF16, "BF16", 1, 2, false;
    /// IEEE half.
    F16, "F16", 1, 2, false;
    /// IEEE single.
    F32, "F32", 1, 4, false;
    /// IEEE double.
    F64, "F64", 1, 8, false;
    /// Two IEEE singles.
    C64, "C64", 1, 8, false;
    /// GGML type 2.
    Q4_0, "Q4_0", 32, 18, true;
    /// GGML type 3.
    Q4_1, "Q4_1", 32, 20, true;
    /// GGML type 6.
    Q5_0, "Q5_0", 32, 22, true;
    /// GGML type 7.
    Q5_1, "Q5_1", 32, 24, true;
    /// GGML type 8.
    Q8_0, "Q8_0", 32, 34, true;
    /// GGML type 9, as candle lays it out: two halves and 32 bytes.
    Q8_1, "Q8_1", 32, 36, true;
    /// GGML type 10.
    Q2K, "Q2_K", 256, 84, true;
    /// GGML type 11.
    Q3K, "Q3_K", 256, 110, true;
    /// GGML type 12.
    Q4K, "Q4_K", 256, 144, true;
    /// GGML type 13.
    Q5K, "Q5_K", 256, 176, true;
    /// GGML type 14.
    Q6K, "Q6_K", 256, 210, true;
    /// GGML type 15.
    Q8K, "Q8_K", 256, 292, true;
}

impl ElementType {
    /// Bytes of a tensor of this type and shape (outermost dimension first).
    ///
    /// `None` when the product overflows, or when the last dimension (for packed floats: the
    /// element count) is not a whole number of blocks.
    pub fn bytes(self, shape: &[u64]) -> Option<u64> {
        let count = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d))?;
        let block = self.block_elements();
        if self.is_quantized() && !shape.last()?.is_multiple_of(block) {
            return None;
        }
        if !count.is_multiple_of(block) {
            return None;
        }
        (count / block).checked_mul(self.block_bytes())
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
