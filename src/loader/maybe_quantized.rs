//! Layers for models that take their weights in either form: GGML blocks, or plain tensors.
//! Which one it is, is decided tensor by tensor; the model's code is the same.

use std::fmt;
use std::sync::Arc;

use candle_core::quantized::{QMatMul, QTensor};
use candle_core::{D, DType, Device, Module, Result, Shape, Tensor};
use candle_nn::{Embedding, Linear, VarBuilder};

use super::QuantizedVarBuilder;

/// Hands out layers that are quantized where the weights are, and plain layers of candle's own elsewhere.
///
/// It comes from the cache ([`IpcCache::maybe_quantized`](super::IpcCache::maybe_quantized)), or is made from
/// any `VarBuilder`, whose tensors are all plain. One model code then runs from the cache, quantized or dense, and
/// from files:
///
/// ```no_run
/// use candle_core::{DType, Device, Module, Result, Tensor};
/// use candle_ipc_cache::{IpcCache, IpcConfig, MaybeQuantizedLinear, MaybeQuantizedVarBuilder};
/// use candle_nn::VarBuilder;
///
/// struct FeedForward {
///     up: MaybeQuantizedLinear,
///     down: MaybeQuantizedLinear,
/// }
///
/// impl FeedForward {
///     fn load(width: usize, inner: usize, vb: &MaybeQuantizedVarBuilder) -> Result<Self> {
///         let up = vb.pp("up_proj").linear_no_bias(width, inner)?;
///         let down = vb.pp("down_proj").linear_no_bias(inner, width)?;
///         Ok(Self { up, down })
///     }
///
///     fn forward(&self, x: &Tensor) -> Result<Tensor> {
///         self.down.forward(&self.up.forward(x)?.gelu()?)
///     }
/// }
///
/// # fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
/// let cache = IpcCache::attach(&IpcConfig::new("llama-8b"), &Device::Cpu)?;
/// let shared = cache.maybe_quantized(DType::F32);
/// let shared = FeedForward::load(4096, 14336, &shared.pp("model.layers.0.mlp"))?;
///
/// # let tensors = std::collections::HashMap::new();
/// let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu); // or from files
/// let own = FeedForward::load(4096, 14336, &vb.pp("model.layers.0.mlp").into())?;
/// # let x = Tensor::zeros((1, 4096), DType::F32, &Device::Cpu)?;
/// # (shared.forward(&x)?, own.forward(&x)?);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct MaybeQuantizedVarBuilder<'a> {
    plain: VarBuilder<'a>,
    /// The same weights on the same path; `None` where all are plain.
    quantized: Option<QuantizedVarBuilder>,
}

impl fmt::Debug for MaybeQuantizedVarBuilder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MaybeQuantizedVarBuilder")
            .field("path", &self.plain.prefix())
            .field("dtype", &self.plain.dtype())
            .finish_non_exhaustive()
    }
}

impl<'a> From<VarBuilder<'a>> for MaybeQuantizedVarBuilder<'a> {
    /// Every layer will be a plain one.
    fn from(plain: VarBuilder<'a>) -> Self {
        Self {
            plain,
            quantized: None,
        }
    }
}

impl<'a> MaybeQuantizedVarBuilder<'a> {
    /// Both must hand out the same weights, and stand on the same path.
    pub(super) fn new(plain: VarBuilder<'a>, quantized: QuantizedVarBuilder) -> Self {
        Self {
            plain,
            quantized: Some(quantized),
        }
    }

    /// The same weights, one prefix further down.
    pub fn pp<S: ToString>(&self, prefix: S) -> Self {
        Self {
            quantized: self.quantized.as_ref().map(|q| q.pp(prefix.to_string())),
            plain: self.plain.pp(prefix),
        }
    }

    /// The plain tensor `name` under this path, of this shape and in the builder's dtype: a norm's weights, for
    /// instance.
    ///
    /// # Errors
    /// As of the `VarBuilder` underneath. From the cache, also when the tensor is stored as GGML blocks, unless
    /// [`IpcConfig::dequantize`](super::IpcConfig::dequantize) allows for it.
    pub fn get<S: Into<Shape>>(&self, shape: S, name: &str) -> Result<Tensor> {
        self.plain.get(shape, name)
    }

    /// A linear layer with `weight` of shape `(out_dim, in_dim)` and `bias` of shape `(out_dim)` under this path.
    ///
    /// # Errors
    /// When one of them is not there or has another shape.
    pub fn linear(&self, in_dim: usize, out_dim: usize) -> Result<MaybeQuantizedLinear> {
        self.linear_b(in_dim, out_dim, true)
    }

    /// A linear layer with `weight` of shape `(out_dim, in_dim)` under this path.
    ///
    /// # Errors
    /// When it is not there or has another shape.
    pub fn linear_no_bias(&self, in_dim: usize, out_dim: usize) -> Result<MaybeQuantizedLinear> {
        self.linear_b(in_dim, out_dim, false)
    }

    /// [`linear`](Self::linear) or [`linear_no_bias`](Self::linear_no_bias).
    ///
    /// # Errors
    /// As of these.
    pub fn linear_b(
        &self,
        in_dim: usize,
        out_dim: usize,
        bias: bool,
    ) -> Result<MaybeQuantizedLinear> {
        let Some(weight) = self.blocks((out_dim, in_dim), "weight")? else {
            return Ok(candle_nn::linear_b(in_dim, out_dim, bias, self.plain.clone())?.into());
        };
        let bias = bias.then(|| self.get(out_dim, "bias")).transpose()?;
        MaybeQuantizedLinear::from_qtensor(weight, bias)
    }

    /// An embedding with `weight` of shape `(vocab, hidden)` under this path.
    ///
    /// # Errors
    /// When it is not there or has another shape.
    pub fn embedding(&self, vocab: usize, hidden: usize) -> Result<MaybeQuantizedEmbedding> {
        match self.blocks((vocab, hidden), "weight")? {
            Some(rows) => MaybeQuantizedEmbedding::from_qtensor(rows, self.dtype()),
            None => Ok(candle_nn::embedding(vocab, hidden, self.plain.clone())?.into()),
        }
    }

    /// Whether there is a tensor `name` under this path, in whatever form.
    pub fn contains_tensor(&self, name: &str) -> bool {
        self.plain.contains_tensor(name)
    }

    /// The plain weights on the same path, for layers that are plain in either form: `candle_nn::rms_norm`, for
    /// instance.
    pub fn var_builder(&self) -> &VarBuilder<'a> {
        &self.plain
    }

    /// The device that the weights lie on.
    pub fn device(&self) -> &Device {
        self.plain.device()
    }

    /// The dtype of plain tensors, and of what embeddings return.
    pub fn dtype(&self) -> DType {
        self.plain.dtype()
    }

    /// The tensor `name` where it is stored as blocks; `None` where it is plain, or not there.
    fn blocks(&self, shape: (usize, usize), name: &str) -> Result<Option<Arc<QTensor>>> {
        match &self.quantized {
            Some(quantized) if quantized.holds_blocks(name) => quantized.get(shape, name).map(Some),
            _ => Ok(None),
        }
    }
}

/// A linear layer over plain weights, or over GGML blocks.
///
/// Maps `(.., in)` to `(.., out)`, in the dtype of its input. Plain weights want that to be their own dtype, as
/// candle does; over blocks it may be any float: the layer computes in F32.
#[derive(Clone, Debug)]
pub struct MaybeQuantizedLinear(LinearForm);

#[derive(Clone, Debug)]
enum LinearForm {
    Plain(Linear),
    Quantized {
        weight: QMatMul,
        /// In F32.
        bias: Option<Tensor>,
    },
}

impl From<Linear> for MaybeQuantizedLinear {
    fn from(linear: Linear) -> Self {
        Self(LinearForm::Plain(linear))
    }
}

impl MaybeQuantizedLinear {
    /// A layer over `weight` of shape `(out, in)`, as `QMatMul::from_arc` takes it, and `bias` of shape `(out)`.
    ///
    /// # Errors
    /// When `weight` is no matrix.
    pub fn from_qtensor(weight: Arc<QTensor>, bias: Option<Tensor>) -> Result<Self> {
        weight.shape().dims2()?;
        let bias = bias.map(|bias| bias.to_dtype(DType::F32)).transpose()?;
        Ok(Self(LinearForm::Quantized {
            weight: QMatMul::from_arc(weight)?,
            bias,
        }))
    }

    /// Whether it was made over a `QTensor`.
    pub fn is_quantized(&self) -> bool {
        matches!(self.0, LinearForm::Quantized { .. })
    }
}

impl Module for MaybeQuantizedLinear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = match &self.0 {
            LinearForm::Plain(linear) => return linear.forward(x),
            LinearForm::Quantized { weight, bias } => (weight, bias),
        };
        // On CUDA, `QMatMul` takes no more than three dimensions.
        let rows = x
            .flatten_to(D::Minus2)?
            .to_dtype(DType::F32)?
            .contiguous()?;
        let y = weight.forward(&rows)?;
        let y = match bias {
            Some(bias) => y.broadcast_add(bias)?,
            None => y,
        };
        let mut shape = x.dims().to_vec();
        shape.pop();
        shape.push(y.dim(D::Minus1)?);
        y.reshape(shape)?.to_dtype(x.dtype())
    }
}

/// An embedding over plain weights, or over rows of GGML blocks, of which it dequantizes those that are asked for.
///
/// Maps ids of shape `(..)` to rows, `(.., hidden)`, in the dtype of the builder that made it.
#[derive(Clone, Debug)]
pub struct MaybeQuantizedEmbedding(EmbeddingForm);

#[derive(Clone, Debug)]
enum EmbeddingForm {
    Plain(Embedding),
    Quantized { rows: Arc<QTensor>, dtype: DType },
}

impl From<Embedding> for MaybeQuantizedEmbedding {
    fn from(embedding: Embedding) -> Self {
        Self(EmbeddingForm::Plain(embedding))
    }
}

impl MaybeQuantizedEmbedding {
    /// An embedding over `rows` of shape `(vocab, hidden)`, which it returns in `dtype`.
    ///
    /// # Errors
    /// When `rows` is no matrix.
    pub fn from_qtensor(rows: Arc<QTensor>, dtype: DType) -> Result<Self> {
        rows.shape().dims2()?;
        Ok(Self(EmbeddingForm::Quantized { rows, dtype }))
    }

    /// The same weights as an output head without bias, `(.., hidden)` to `(.., vocab)`, in models that tie the two.
    /// Both read one storage.
    ///
    /// # Errors
    /// When candle refuses.
    pub fn as_linear(&self) -> Result<MaybeQuantizedLinear> {
        match &self.0 {
            EmbeddingForm::Plain(embedding) => {
                Ok(Linear::new(embedding.embeddings().clone(), None).into())
            }
            EmbeddingForm::Quantized { rows, .. } => {
                MaybeQuantizedLinear::from_qtensor(rows.clone(), None)
            }
        }
    }

    /// Whether it was made over a `QTensor`.
    pub fn is_quantized(&self) -> bool {
        matches!(self.0, EmbeddingForm::Quantized { .. })
    }
}

impl Module for MaybeQuantizedEmbedding {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        match &self.0 {
            EmbeddingForm::Plain(embedding) => embedding.forward(ids),
            EmbeddingForm::Quantized { rows, dtype } => rows.embedding(ids)?.to_dtype(*dtype),
        }
    }
}
