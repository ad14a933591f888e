//! The table of docs/conformance.md, from what the cases showed.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use candle_core::{DType, Device};

use crate::copies::Copies;
use crate::harness::Row;

/// Patterns of tensor names that a cell lists before it says how many more there are.
const PATTERNS: usize = 4;

const LEGEND: &str = "\
Written by `CANDLE_CACHE_TEST_TABLE=FILE cargo test --test models`, not by hand; on a GPU with `--features cuda` and \
`CANDLE_CACHE_TEST_DEVICE=cuda:0`.

Each model below, of candle-transformers 0.11.1, is made with `VarMap` on a tiny config, \
saved, and loaded into the cache. It is then built from the file and from the cache. A row says in which dtypes the \
outputs of the two were equal to the bit, and how many tensors and bytes the file has. Numbers in names are written `*`.
";

const ON_THE_HOST: &str = "
- *copied by the constructor*: it makes something of its own from these and keeps that, which costs every engine \
memory of its own. A change to the tensor's memory after the constructor shows in the outputs otherwise than one \
before it, or not at all.
- *of these let go*: the built model does not read the tensor itself any more.
- *let go by the first forward*: a second forward pass does not read it. `—`: its second pass goes on from the first, \
so this cannot be told.
- *not used*: no output depends on it, and what happens to it cannot be told. `—`: not looked for, and copies were \
looked for by kinds, which are the last two words of a name; a kind is named as soon as one of it is copied.
- `—` in all four: copies were not looked for, because a forward pass is slow.

Copies are looked for in F32. Those that end with the constructor or with a forward pass are not seen.
";

const ON_A_GPU: &str = "
- *requests*: tensors that the cache served to the constructor, without a copy.
- *alive*: those of them that the model, or what it is computed from, still held after the constructor, and after the first \
forward pass: also where it does not read them any more.

Requests are counted in F32: none where candle does not run the model in it.
";

/// Markdown: what the columns mean, one row for each model, and the models that are not run.
pub(crate) fn markdown(rows: &[Row], excluded: &[(&str, &str)], device: &Device) -> String {
    let place = if device.is_cpu() { "CPU" } else { "GPU" };
    let mut text = format!("# Models of candle-transformers on the {place}\n\n{LEGEND}");
    let (legend, head, columns) = if device.is_cpu() {
        (
            ON_THE_HOST,
            "| model | tensors | F32 bytes | equal in | asked for twice | copied by the constructor | of these let go | let go by the first forward | not used |",
            9,
        )
    } else {
        (
            ON_A_GPU,
            "| model | tensors | F32 bytes | equal in | requests | alive after the constructor | alive after the first forward |",
            7,
        )
    };
    text.push_str(legend);
    let equal_in = |dtype: DType| rows.iter().filter(|r| r.dtypes.contains(&dtype)).count();
    writeln!(
        text,
        "\nOn the {place}: {} models in F32, {} in BF16.\n",
        equal_in(DType::F32),
        equal_in(DType::BF16)
    )
    .unwrap();
    let rule = "| --- ".repeat(columns);
    writeln!(text, "{head}\n{rule}|").unwrap();
    for row in rows {
        let dtypes: Vec<_> = row.dtypes.iter().map(name).collect();
        let (model, dtypes) = (row.name, dtypes.join(", "));
        write!(
            text,
            "| `{model}` | {} | {} | {dtypes} |",
            row.tensors, row.bytes
        )
        .unwrap();
        if !device.is_cpu() {
            let (built, ran) = row.alive.map_or(("—".into(), "—".into()), |(built, ran)| {
                (built.to_string(), ran.to_string())
            });
            write!(text, " {} | {built} | {ran} |", row.requests).unwrap();
        }
        if device.is_cpu() {
            let first_forward = |copies: &Copies| match row.growing {
                true => "—".into(),
                false => cell(&copies.first_forward),
            };
            let unused = |copies: &Copies| copies.unused.as_deref().map_or("—".into(), cell);
            let copies = row.copies.as_ref();
            for column in [
                Some(cell(&row.asked_twice)),
                copies.map(|copies| cell(&copies.constructor)),
                copies.map(|copies| cell(&copies.let_go)),
                copies.map(first_forward),
                copies.map(unused),
            ] {
                write!(text, " {} |", column.as_deref().unwrap_or("—")).unwrap();
            }
        }
        text.push('\n');
    }
    let refused = |row: &Row| {
        let line = |(dtype, why): &(DType, String)| {
            let why = why.lines().next().unwrap_or_default();
            format!("- `{}`, {dtype:?}: {why}\n", row.name)
        };
        row.refused.iter().map(line).collect::<String>()
    };
    let refused: String = rows.iter().map(refused).collect();
    if !refused.is_empty() {
        write!(
            text,
            "\n## What candle itself does not run, or runs without a finite output\n\n{refused}"
        )
        .unwrap();
    }
    if !excluded.is_empty() {
        text.push_str("\n## Not run here\n\n");
        for (model, why) in excluded {
            writeln!(text, "- `{model}`: {why}").unwrap();
        }
    }
    text
}

fn name(dtype: &DType) -> String {
    format!("{dtype:?}")
}

/// How many, and which: names that differ in numbers alone are written once.
fn cell(names: &[String]) -> String {
    if names.is_empty() {
        return "0".into();
    }
    let patterns: BTreeSet<String> = names.iter().map(|name| pattern(name)).collect();
    let mut listed: Vec<_> = patterns.iter().take(PATTERNS).cloned().collect();
    if patterns.len() > PATTERNS {
        listed.push(format!("{} more", patterns.len() - PATTERNS));
    }
    format!("{}: {}", names.len(), listed.join(", "))
}

/// The name with its numbers as `*`, in backticks.
fn pattern(name: &str) -> String {
    let part = |part: &str| match part.parse::<u32>() {
        Ok(_) => "*".to_string(),
        Err(_) => part.to_string(),
    };
    let parts: Vec<_> = name.split('.').map(part).collect();
    format!("`{}`", parts.join("."))
}
