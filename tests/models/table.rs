//! The table of docs/conformance.md, from what the cases showed.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use candle_core::{DType, Device};

use crate::harness::Row;

/// Patterns of tensor names that a cell lists before it says how many more there are.
const PATTERNS: usize = 4;

/// Markdown: one row for each model, then the models that are not run.
pub(crate) fn markdown(rows: &[Row], excluded: &[(&str, &str)], device: &Device) -> String {
    let mut text = String::new();
    let (head, columns) = if device.is_cpu() {
        (
            "| model | tensors | F32 bytes | equal in | asked for twice | copied by the constructor | of these let go | let go by the first forward | not used |",
            9,
        )
    } else {
        (
            "| model | tensors | F32 bytes | equal in | requests | alive after the constructor | alive after the first forward |",
            7,
        )
    };
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
        if let Some((built, ran)) = row.alive {
            write!(text, " {} | {built} | {ran} |", row.requests).unwrap();
        }
        if let Some(copies) = &row.copies {
            for names in [
                &row.asked_twice,
                &copies.constructor,
                &copies.let_go,
                &copies.first_forward,
                &copies.unused,
            ] {
                write!(text, " {} |", cell(names)).unwrap();
            }
        }
        text.push('\n');
    }
    let refusals: Vec<_> = rows.iter().filter(|row| row.no_bf16.is_some()).collect();
    if !refusals.is_empty() {
        text.push_str("\nNot in BF16, and candle's reason:\n\n");
        for row in refusals {
            let why = row.no_bf16.as_deref().unwrap_or_default();
            let why = why.lines().next().unwrap_or_default();
            writeln!(text, "- `{}`: {why}", row.name).unwrap();
        }
    }
    if !excluded.is_empty() {
        text.push_str("\nNot run:\n\n");
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
pub(crate) fn pattern(name: &str) -> String {
    let part = |part: &str| match part.parse::<u32>() {
        Ok(_) => "*".to_string(),
        Err(_) => part.to_string(),
    };
    let parts: Vec<_> = name.split('.').map(part).collect();
    format!("`{}`", parts.join("."))
}
