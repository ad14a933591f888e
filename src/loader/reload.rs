//! New weights in place: the variables of a `VarMap` take the cache's values, all of them or none.

use candle_core::{Tensor, Var};
use candle_nn::VarMap;
use std::sync::PoisonError;

use super::IpcCache;
use super::build::{BuildError, Unmet};
use crate::meta_model::Findings;

impl IpcCache {
    /// Sets every variable of `map` to the tensor of its name, in the variable's dtype and on its device. A model that
    /// was built over the map computes with the new weights from then on.
    ///
    /// Everything is checked and every tensor made before the first variable is set, and the old values are kept
    /// until the last is: for that time the variables take their size up to twice more. Whoever computes with them
    /// meanwhile sees old and new ones mixed. Tensors that the map has no variable for are left out.
    ///
    /// # Errors
    /// [`BuildError::Unmet`] lists every variable that the cache has no tensor of the same shape for, or none that
    /// can be had in its dtype; [`BuildError::Set`] names the one that could not be set. Either way, unless the latter
    /// says otherwise, the map is as it was.
    pub fn reload_into(&self, map: &VarMap) -> Result<(), BuildError> {
        let shared = &*self.shared;
        let vars = map.data().lock().unwrap_or_else(PoisonError::into_inner);
        let mut vars: Vec<(&String, &Var)> = vars.iter().collect();
        vars.sort_unstable_by_key(|(name, _)| *name);

        let table = shared.table();
        let faults_under = |fit: &[_]| {
            let fault = |(name, var): &(&String, &Var)| {
                table.fault(name, Some(var.dims()), var.dtype(), fit)
            };
            vars.iter().filter_map(fault).collect::<Vec<_>>()
        };
        let faults = faults_under(&[]);
        let entry = || Box::new(shared.report.entry.clone());
        if !faults.is_empty() {
            let names: Vec<String> = vars.iter().map(|(name, _)| (*name).clone()).collect();
            let mut findings = Findings {
                fit: table.fit(&faults, &names),
                faults,
                ..Findings::default()
            };
            let left = faults_under(&findings.fit);
            if left.len() < findings.faults.len() {
                findings.fitted = table.fitted(&findings.fit, &names);
                findings.faults = left;
            } else {
                findings.fit.clear();
            }
            return Err(BuildError::Unmet {
                entry: entry(),
                unmet: Box::new(Unmet::of(shared, findings)),
                source: None,
            });
        }

        let failed = |name: &str, source, restored| BuildError::Set {
            entry: entry(),
            name: name.to_string(),
            source: Box::new(source),
            restored,
        };
        let mut changes = Vec::with_capacity(vars.len());
        for (name, var) in vars {
            let value = shared
                .locate(name)
                .and_then(|found| shared.plain(found.index, None, var.dtype(), var.device()))
                .map_err(|source| failed(name, source, true))?;
            changes.push((name.as_str(), var, value));
        }
        exchange(changes, Var::set).map_err(|broken| {
            let Broken {
                name,
                source,
                restored,
            } = broken;
            failed(&name, source, restored)
        })
    }
}

/// Where a series of changes broke off.
#[derive(Debug)]
struct Broken {
    name: String,
    source: candle_core::Error,
    /// Whether what had been changed has been changed back.
    restored: bool,
}

/// Sets variables to new values by `set`, and back to the old ones where one cannot be set.
fn exchange(
    changes: Vec<(&str, &Var, Tensor)>,
    set: impl Fn(&Var, &Tensor) -> candle_core::Result<()>,
) -> Result<(), Broken> {
    let mut old: Vec<(&Var, Tensor)> = Vec::with_capacity(changes.len());
    for (name, var, value) in changes {
        let changed = var.as_detached_tensor().copy().and_then(|copy| {
            // Before it is set: a variable that could not be set may be half set.
            old.push((var, copy));
            set(var, &value)
        });
        let Err(source) = changed else { continue };
        let mut restored = true;
        for (var, copy) in old.iter().rev() {
            restored &= set(var, copy).is_ok();
        }
        return Err(Broken {
            name: name.to_string(),
            source,
            restored,
        });
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::cell::Cell;

    use candle_core::{DType, Device, Error};

    use super::*;

    fn values(var: &Var) -> Vec<f32> {
        var.to_vec1().unwrap()
    }

    /// Three variables of zeros, set to ones by a setter that fails at these calls.
    fn set_to_ones(fails: &[usize]) -> (Vec<Var>, Result<(), Broken>) {
        let zeros = || Var::zeros(2, DType::F32, &Device::Cpu).unwrap();
        let vars = vec![zeros(), zeros(), zeros()];
        let one = Tensor::ones(2, DType::F32, &Device::Cpu).unwrap();
        let named = ["a", "b", "c"].into_iter().zip(&vars);
        let changes = named.map(|(name, var)| (name, var, one.clone())).collect();
        let calls = Cell::new(0);
        let result = exchange(changes, |var, value| {
            calls.set(calls.get() + 1);
            if fails.contains(&calls.get()) {
                return Err(Error::Msg("out of order".into()));
            }
            var.set(value)
        });
        (vars, result)
    }

    #[test]
    fn variables_are_all_set_or_all_as_they_were() {
        let (vars, result) = set_to_ones(&[]);
        assert!(result.is_ok() && vars.iter().all(|var| values(var) == [1., 1.]));
        for failing in 1..=3 {
            let (vars, result) = set_to_ones(&[failing]);
            let broken = result.unwrap_err();
            assert_eq!(broken.name, ["a", "b", "c"][failing - 1]);
            assert!(broken.restored);
            assert!(vars.iter().all(|var| values(var) == [0., 0.]), "{failing}");
        }
    }

    #[test]
    fn what_could_not_be_set_back_is_not_said_to_be_as_it_was() {
        let (vars, result) = set_to_ones(&[3, 5]);
        assert!(!result.unwrap_err().restored);
        assert_eq!(values(&vars[0]), [0., 0.]);
        assert_eq!(values(&vars[1]), [1., 1.]);
    }
}
