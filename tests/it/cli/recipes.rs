//! Every recipe in configs/recipes is a valid run and fits on the machine that it names.

use std::collections::BTreeSet;
use std::fs;

use crate::program::stdout_of;

/// File, number of processes, model shape, GiB of memory per GPU.
const RECIPES: [(&str, usize, &str, usize); 6] = [
    ("code-7b-8gpu.toml", 8, "qwen2.5-7b", 79),
    ("full-32b-8gpu.toml", 8, "qwen2.5-32b", 139),
    ("gsm8k-1.5b-1gpu.toml", 1, "qwen2.5-1.5b", 79),
    ("gsm8k-1.5b-8gpu.toml", 8, "qwen2.5-1.5b", 79),
    ("lora-14b-2gpu.toml", 2, "qwen2.5-14b", 79),
    ("math-7b-8gpu.toml", 8, "qwen2.5-7b", 79),
];

#[test]
fn every_recipe_fits_the_machine_that_it_names() {
    let files = fs::read_dir("configs/recipes").unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(files.collect::<BTreeSet<_>>(), RECIPES.map(|recipe| recipe.0.to_owned()).into());
    for (file, nproc, preset, gib) in RECIPES {
        let path = format!("configs/recipes/{file}");
        let plan =
            stdout_of(&format!("plan --nproc {nproc} --config {path} --model_preset {preset} --gpu_memory_gib {gib}"));
        assert!(plan.contains(&format!("of {gib}.0 GiB available")), "{file}\n{plan}");
        // The file says how it is started.
        let text = fs::read_to_string(&path).unwrap();
        let line =
            text.lines().find(|line| line.contains("colo-grpo ")).unwrap_or_else(|| panic!("{file}: no command"));
        assert!(line.contains(&path), "{file}: {line}");
        assert_eq!(line.contains(&format!("--nproc {nproc} ")), nproc > 1, "{file}: {line}");
    }
}
