//! The GPU side in a build without CUDA: the same names, so that callers need no `cfg`.
//! Nothing here can be made; trying says how to build it.

use std::any::Any;
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use candle_core::quantized::QTensor;
use candle_core::{Device, Tensor};

use super::{Alive, MappedWeights, Plain, TensorError, TensorPart};
use crate::manifest::Manifest;
use crate::slab::SlabError;

/// Weights in GPU slabs: in this build there are none.
#[derive(Debug)]
pub struct CudaWeights {
    never: Infallible,
    /// As there, dropping one does something.
    _held: Arc<dyn Any + Send + Sync>,
}

/// Nothing is mapped from a GPU in this build.
pub fn sweep() -> Alive {
    Alive::default()
}

impl CudaWeights {
    /// Says that this build has no CUDA.
    ///
    /// # Errors
    /// Always.
    pub fn map(
        _: Arc<Manifest>,
        _: &[OwnedFd],
        _: &Device,
        _: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, SlabError> {
        Err(SlabError::Device(
            "this build has no CUDA tensors: build the engine with `--features cuda`".into(),
        ))
    }
}

impl MappedWeights for CudaWeights {
    fn plain(&self, _: usize, _: &Device) -> Result<Plain, TensorError> {
        match self.never {}
    }

    fn part(&self, _: usize, _: &TensorPart, _: &Device) -> Result<Plain, TensorError> {
        match self.never {}
    }

    fn quantized(&self, _: usize) -> Result<Arc<QTensor>, TensorError> {
        match self.never {}
    }

    fn bytes(&self, _: usize) -> Option<&[u8]> {
        match self.never {}
    }

    fn copied(&self, _: usize, _: &Device) -> Result<Tensor, TensorError> {
        match self.never {}
    }

    fn read(&self, _: usize, _: &mut [u8]) -> Result<(), TensorError> {
        match self.never {}
    }

    fn verify(&self) -> Result<(), TensorError> {
        match self.never {}
    }

    fn sweep(&self) -> Alive {
        match self.never {}
    }
}
