//! A checkpoint that can be damaged: the variables of a model, by name.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor};
use candle_ipc_cache::manifest::ElementType;
use candle_ipc_cache::{IpcCache, IpcConfig};
use candle_nn::{VarBuilder, VarMap};

use crate::stand_in::{Model, StandIn};

/// Type, shape and bytes.
type Stored = (ElementType, Vec<u64>, Vec<u8>);

#[derive(Clone)]
pub(crate) struct Checkpoint(pub(crate) BTreeMap<String, Stored>);

impl Checkpoint {
    /// What a constructor asks a `VarMap` for.
    pub(crate) fn of<M>(build: impl Fn(VarBuilder<'static>) -> Result<M>) -> Self {
        let map = VarMap::new();
        let vb = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
        build(vb).expect("a model of variables");
        Self::of_map(&map)
    }

    pub(crate) fn of_map(map: &VarMap) -> Self {
        let vars = map.data().lock().unwrap();
        let stored = |tensor: &Tensor| {
            let mut bytes = Vec::new();
            tensor.write_bytes(&mut bytes).unwrap();
            let shape = tensor.dims().iter().map(|d| *d as u64).collect();
            (ElementType::F32, shape, bytes)
        };
        let named = vars.iter().map(|(name, var)| (name.clone(), stored(var)));
        Self(named.collect())
    }

    pub(crate) fn names(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }

    pub(crate) fn drop(mut self, names: &[&str]) -> Self {
        for name in names {
            assert!(self.0.remove(*name).is_some(), "{name}");
        }
        self
    }

    /// Swaps the dimensions of a matrix that is not square.
    pub(crate) fn transpose(mut self, name: &str) -> Self {
        let shape = &mut self.0.get_mut(name).expect(name).1;
        assert!(shape.len() == 2 && shape[0] != shape[1], "{name} {shape:?}");
        shape.reverse();
        self
    }

    /// Gives a tensor a type that a plain request cannot be answered with.
    pub(crate) fn retype(mut self, name: &str, element: ElementType) -> Self {
        let stored = self.0.get_mut(name).expect(name);
        stored.0 = element;
        stored.2 = vec![0; element.bytes(&stored.1).expect("whole blocks") as usize];
        self
    }

    /// Gives a tensor another shape of as many elements or fewer.
    pub(crate) fn reshape(mut self, name: &str, shape: &[u64]) -> Self {
        let stored = self.0.get_mut(name).expect(name);
        stored.1 = shape.to_vec();
        stored.2.truncate(stored.0.bytes(shape).unwrap() as usize);
        self
    }

    pub(crate) fn rename(self, rename: impl Fn(&str) -> String) -> Self {
        let renamed = self.0.into_iter();
        Self(
            renamed
                .map(|(name, stored)| (rename(&name), stored))
                .collect(),
        )
    }

    pub(crate) fn serve(self) -> StandIn {
        let mut model = Model::new("m");
        for (name, (element, shape, bytes)) in self.0 {
            model = model.tensor(&name, element, &shape, bytes);
        }
        StandIn::serving(model.build())
    }

    /// An engine of this checkpoint, which outlives its daemon.
    pub(crate) fn attach(self) -> IpcCache {
        self.attach_with(|config| config)
    }

    pub(crate) fn attach_with(self, set: impl Fn(IpcConfig) -> IpcConfig) -> IpcCache {
        let daemon = self.serve();
        IpcCache::attach(&set(daemon.config("m")), &Device::Cpu).expect("an attach")
    }
}
