//! What the registry says when it says no: who holds an entry, what is there instead, what comes closest.

use std::collections::{BTreeMap, BTreeSet};

use super::{Entry, Epoch, MAX_HOLDERS, Refused, Unload};
use crate::protocol::{EntryId, EpochId, Refusal};

/// Why an entry may not be unloaded without force.
pub(super) fn in_use(id: &EntryId, slot: &Entry) -> Result<(), Refused> {
    if let Some(ready) = &slot.ready
        && !ready.holders.is_empty()
    {
        let mut pids: Vec<String> = ready
            .holders
            .values()
            .take(MAX_HOLDERS)
            .map(|holder| holder.pid.to_string())
            .collect();
        if ready.holders.len() > MAX_HOLDERS {
            pids.push("…".into());
        }
        return Err(Refused::new(
            Refusal::InUse,
            format!(
                "{id} is held by {} engines (processes {}): stop them, or remove it with --force; they keep what \
                 they have mapped",
                ready.holders.len(),
                pids.join(", ")
            ),
        ));
    }
    if slot.loading.is_some() {
        return Err(Refused::new(
            Refusal::AlreadyLoading,
            format!("{id} is loading: wait for it, or abandon the load with --force"),
        ));
    }
    Ok(())
}

/// Says that there is nothing to unload, and what comes closest.
pub(super) fn nothing_to_unload(table: &BTreeMap<EntryId, Entry>, unload: &Unload) -> Refused {
    let mut what = format!("`{}`", unload.name);
    if let Some(role) = &unload.role {
        what.push_str(&format!(" in role `{role}`"));
    }
    if let Some(device) = unload.device {
        what.push_str(&format!(" on {device}"));
    }
    if let Some(shard) = unload.shard {
        what.push_str(&format!(" ({shard})"));
    }
    if let Some(epoch) = unload.epoch {
        what.push_str(&format!(" of epoch {epoch}"));
    }
    Refused::new(
        Refusal::NoEntry,
        format!("no entry {what} is held; {}", nearest(table, &unload.name)),
    )
}

/// Tells a worker that its load is not wanted any more.
pub(super) fn abandoned(entry: &EntryId) -> Refused {
    Refused::new(
        Refusal::NoEntry,
        format!("{entry} was unloaded while it was loading"),
    )
}

/// Says that an epoch is gone, and which one is there instead.
pub(super) fn no_epoch(entry: &EntryId, wanted: EpochId, held: Option<&Epoch>) -> Refused {
    let instead = match held {
        None => ": attach without an epoch".to_string(),
        Some(Epoch { id, ranks: 1, .. }) if !entry.shard.is_whole() => format!(
            ", the daemon holds this rank alone, loaded by itself as epoch {id}: ranks of two loads do not go together, so load \
             all of them again as one set"
        ),
        Some(Epoch { id, ranks: 1, .. }) => {
            format!(", the daemon holds epoch {id}: attach without an epoch, or to that one")
        }
        Some(Epoch { id, ranks, .. }) => format!(
            ", the daemon holds epoch {id}, a set of {ranks} ranks: ranks of two sets do not go together, so attach all of \
             them to that one, or load the set again where a rank of it was replaced alone"
        ),
    };
    Refused::new(
        Refusal::NoEpoch,
        format!("epoch {wanted} of {entry} is gone{instead}"),
    )
}

/// Says that an entry is not there, and what comes closest.
pub(super) fn absent(table: &BTreeMap<EntryId, Entry>, wanted: &EntryId) -> Refused {
    let held = |id: &EntryId, slot: &Entry| {
        id.name == wanted.name && (slot.ready.is_some() || slot.loading.is_some())
    };
    let same_name: Vec<&EntryId> = table
        .iter()
        .filter(|(id, slot)| held(id, slot))
        .map(|(id, _)| id)
        .take(8)
        .collect();
    let list = |ids: &[&EntryId]| {
        let texts: Vec<String> = ids.iter().map(ToString::to_string).collect();
        texts.join(", ")
    };
    let same_role = || {
        let ids = same_name.iter().copied();
        ids.filter(|id| id.role == wanted.role)
    };
    let elsewhere: Vec<&EntryId> = same_role().filter(|id| id.shard == wanted.shard).collect();
    if !elsewhere.is_empty() {
        return Refused::new(
            Refusal::OtherDevice,
            format!(
                "{wanted} is not held, the daemon has {}: attach with that device, or load it with \
                 `candle-cache load --device`",
                list(&elsewhere)
            ),
        );
    }
    let others: Vec<&EntryId> = same_role().collect();
    if !others.is_empty() {
        let way_out = if others.iter().any(|id| id.shard.is_whole()) {
            "attach to all of it, which serves every rank's slices, or load the ranks with `candle-cache load --tp`"
        } else {
            "name one of these (`IpcConfig::shard`), or load the other with `candle-cache load`"
        };
        return Refused::new(
            Refusal::OtherShard,
            format!(
                "{wanted} is not held, the daemon has {}: {way_out}",
                list(&others)
            ),
        );
    }
    let hint = if same_name.is_empty() {
        nearest(table, &wanted.name)
    } else {
        format!("the daemon has {}: name its role", list(&same_name))
    };
    Refused::new(Refusal::NoEntry, format!("no entry {wanted}; {hint}"))
}

/// The held names that come closest to `wanted`.
pub(super) fn nearest(table: &BTreeMap<EntryId, Entry>, wanted: &str) -> String {
    let names: BTreeSet<&str> = table
        .iter()
        .filter(|(_, slot)| slot.ready.is_some() || slot.loading.is_some())
        .map(|(id, _)| id.name.as_str())
        .collect();
    if names.is_empty() {
        return "the daemon holds nothing yet: `candle-cache load MODEL`".into();
    }
    let count = names.len();
    // Bounded: everybody waits for the table meanwhile.
    let start = |name: &str| name.chars().take(64).collect::<String>();
    let wanted = start(wanted);
    let mut close: Vec<(f64, &str)> = names
        .into_iter()
        .take(1000)
        .map(|name| (strsim::jaro_winkler(&start(name), &wanted), name))
        .filter(|(likeness, _)| *likeness > 0.6)
        .collect();
    close.sort_by(|a, b| b.0.total_cmp(&a.0));
    if close.is_empty() {
        return format!(
            "none of the {count} held names is like it: `candle-cache status` lists them"
        );
    }
    let close: Vec<String> = close
        .iter()
        .take(3)
        .map(|(_, name)| format!("`{name}`"))
        .collect();
    format!("nearest: {}", close.join(", "))
}
