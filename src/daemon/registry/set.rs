//! Sets of ranks: how long the ranks of one that was replaced can still be had by its id.
//! As long as an engine holds any of them: the engines of the others may be on their way.

use super::*;

/// Lets go of what nobody can ask for any more among the entries of `entry`'s name and role, and forgets those that are
/// empty.
pub(super) fn settle(table: &mut BTreeMap<EntryId, Entry>, entry: &EntryId) {
    let first = EntryId {
        device: DeviceId::Host,
        shard: ShardId::default(),
        ..entry.clone()
    };
    let ranks: Vec<EntryId> = table
        .range(first..)
        .map(|(id, _)| id)
        .take_while(|id| (&id.name, &id.role) == (&entry.name, &entry.role))
        .cloned()
        .collect();
    settle_ranks(table, &ranks);
}

/// As [`settle`], for every entry.
pub(super) fn settle_all(table: &mut BTreeMap<EntryId, Entry>) {
    let all: Vec<EntryId> = table.keys().cloned().collect();
    settle_ranks(table, &all);
}

fn settle_ranks(table: &mut BTreeMap<EntryId, Entry>, ranks: &[EntryId]) {
    let slots = || ranks.iter().filter_map(|id| table.get(id));
    let held: HashSet<EpochId> = slots()
        .flat_map(|slot| {
            let ready = slot.ready.iter().map(|r| (r.epoch.id, &r.holders));
            ready.chain(slot.retired.iter().map(|r| (r.epoch, &r.holders)))
        })
        .filter(|(_, holders)| !holders.is_empty())
        .map(|(id, _)| id)
        .collect();
    for id in ranks {
        let Some(slot) = table.get_mut(id) else {
            continue;
        };
        slot.retired.retain(|retired| {
            !retired.holders.is_empty() || retired.kept.is_some() && held.contains(&retired.epoch)
        });
        if slot.is_empty() {
            table.remove(id);
        }
    }
}
