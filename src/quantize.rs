//! Which tensor becomes which type before it is exported: recipes, importance matrices, and what a recipe makes of a
//! checkpoint. Decided from headers alone; nothing here reads a tensor's bytes.

use std::sync::Arc;

mod assign;
mod imatrix;
mod names;
mod recipe;

pub use assign::{AssignError, Assigned, Why, assign};
pub use imatrix::{Imatrix, ImatrixError};
pub use recipe::{Recipe, RecipeError, TYPES, Target};

/// How to quantize a checkpoint while it is loaded.
#[derive(Clone, Debug)]
pub struct Quantize {
    /// What becomes what.
    pub recipe: Recipe,
    /// How much each column matters, for the types that can use it.
    pub imatrix: Option<Arc<Imatrix>>,
    /// Quantize NaN, infinities and values beyond a block scale's range into whatever comes out.
    pub allow_nonfinite: bool,
    /// Dequantize GGML blocks and quantize them again.
    pub requantize: bool,
}

impl Quantize {
    /// By `recipe`, with nothing else.
    pub fn new(recipe: Recipe) -> Self {
        Self {
            recipe,
            imatrix: None,
            allow_nonfinite: false,
            requantize: false,
        }
    }

    /// What it adds to an entry's [`crate::key::Key`]: the recipe in its canonical spelling, and everything else that
    /// decides which bytes come out, or whether they may.
    pub fn canonical(&self) -> String {
        let mut text = self.recipe.to_string();
        if let Some(imatrix) = &self.imatrix {
            text += &format!("; imatrix {}", imatrix.digest());
        }
        if self.allow_nonfinite {
            text += "; nonfinite allowed";
        }
        if self.requantize {
            text += "; requantized";
        }
        text
    }
}
