//! Models of images, sound and both with text.

use crate::Excluded;
use crate::harness::Case;

#[path = "audio.rs"]
mod audio;
#[path = "contrastive.rs"]
mod contrastive;
#[path = "convnet.rs"]
mod convnet;
#[path = "diffusion.rs"]
mod diffusion;
#[path = "inputs.rs"]
mod inputs;
#[path = "multimodal.rs"]
mod multimodal;
#[path = "transformer.rs"]
mod transformer;

pub(crate) const EXCLUDED: Excluded = &[
    (
        "csm::Model",
        "it is made of two Llamas, whose configs are named: the smaller is 444 MB in F32",
    ),
    (
        "dac::Model",
        "its widths, up to 1536, are in the source, some 250 MB in F32: its encoder, quantizer and decoder are run instead",
    ),
    (
        "parler_tts::Model",
        "contains `dac::Model`: its text encoder and its decoder are run instead",
    ),
    (
        "stable_diffusion::clip::ClipTextTransformer",
        "its config's fields are private; the smallest preset is 492 MB in F32",
    ),
    (
        "vgg::Vgg",
        "its first fully connected layer is 411 MB in F32, whatever the input. It asks its builder for the last layer in each forward pass",
    ),
    (
        "wuerstchen::diffnext::WDiffNeXt",
        "its widths, up to 1280, and depths are in the source: over 2 GB in F32",
    ),
];

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = convnet::cases();
    cases.extend(transformer::cases());
    cases.extend(audio::cases());
    cases.extend(diffusion::cases());
    cases.extend(contrastive::cases());
    cases.extend(multimodal::cases());
    cases
}
