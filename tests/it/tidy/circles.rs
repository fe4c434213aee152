//! Checks that files of a module do not import each other cyclically.

use std::collections::{BTreeMap, BTreeSet};

use super::sources;

/// A module's path from the crate's root, as a list of names.
type ModulePath = Vec<String>;

/// Splits a path in source code into its names, including `crate`, `self` and `super`.
fn names(path: &str) -> ModulePath {
    path.split("::")
        .map(|name| name.trim().split(" as ").next().unwrap().to_owned())
        .filter(|name| !name.is_empty())
        .collect()
}

/// The paths of a `use` declaration, with its groups expanded.
fn used_paths(tree: &str, before: &str, found: &mut Vec<ModulePath>) {
    let Some((head, rest)) = tree.split_once('{') else { return found.push(names(&format!("{before}{tree}"))) };
    let mut depth = 0;
    let items = rest.rsplit_once('}').unwrap().0.split(|c: char| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        c == ',' && depth == 0
    });
    items.for_each(|item| used_paths(item.trim(), &format!("{before}{}", head.trim()), found));
}

/// The modules of a source tree without tests. For each, the paths that it imports and all paths that it names.
struct ModuleTree {
    modules: BTreeMap<ModulePath, (Vec<ModulePath>, Vec<ModulePath>)>,
}

impl ModuleTree {
    fn new(sources: &[(String, String)]) -> Self {
        let tests = regex::Regex::new(r"(?m)^#\[cfg\(test\)\]\n(?:pub(?:\([a-z]+\))? )?mod (\w+);").unwrap();
        let inline = regex::Regex::new(r"(?ms)^#\[cfg\(test\)\]\nmod \w+ \{\n.*?^\}\n").unwrap();
        let comment = regex::Regex::new(r"(?m)^\s*//.*$| // .*$").unwrap();
        let used = regex::Regex::new(r"(?m)^\s*(?:pub(?:\([a-z: ]+\))? )?use ([\w:{},*\s]+);").unwrap();
        let named = regex::Regex::new(r"\b(?:super|crate|self)(?:::\w+)+").unwrap();
        let path_of = |file: &str| -> ModulePath {
            let path = file.trim_end_matches(".rs").trim_end_matches("/mod");
            path.split('/').map(str::to_owned).collect()
        };
        let of_tests: BTreeSet<ModulePath> = sources
            .iter()
            .flat_map(|(file, text)| {
                tests.captures_iter(text).map(|found| [path_of(file), vec![found[1].to_owned()]].concat())
            })
            .collect();
        let is_test = |path: &ModulePath| (1..=path.len()).any(|len| of_tests.contains(&path[..len]));
        let module = |(file, text): &(String, String)| {
            let code = comment.replace_all(text, "");
            let code = inline.replace_all(&code, "");
            let mut imports = Vec::new();
            used.captures_iter(&code).for_each(|found| used_paths(&found[1], "", &mut imports));
            let mut all = imports.clone();
            let code = used.replace_all(&code, ""); // or the place of a group would be named by itself
            all.extend(named.find_iter(&code).map(|found| names(found.as_str())));
            (path_of(file), (imports, all))
        };
        Self { modules: sources.iter().map(module).filter(|(path, _)| !is_test(path)).collect() }
    }

    /// The module that defines the item named by `path` in module `from`, after resolving re-exports.
    fn definer(&self, from: &[String], path: &[String], depth: usize) -> Option<ModulePath> {
        let mut module = from.to_vec();
        let mut names = path;
        match path.first()?.as_str() {
            "crate" => (module, names) = (Vec::new(), &path[1..]),
            "self" => names = &path[1..],
            "super" => {
                while names.first().is_some_and(|name| name == "super") {
                    module.pop();
                    names = &names[1..];
                }
            }
            child if !self.modules.contains_key(&[from, &[child.to_owned()]].concat()) => return None,
            _ => {}
        }
        while let Some(name) = names.first() {
            let inner = [&module[..], std::slice::from_ref(name)].concat();
            if !self.modules.contains_key(&inner) {
                break;
            }
            (module, names) = (inner, &names[1..]);
        }
        let exports = |(imports, _): &(Vec<ModulePath>, Vec<ModulePath>)| {
            let named = imports.iter().filter(|import| import.last() == names.first() && import[0] != "super");
            let inner = named.filter_map(|import| self.definer(&module, import, depth + 1));
            inner.into_iter().find(|found| found.len() > module.len() && found.starts_with(&module))
        };
        let again = self.modules.get(&module).filter(|_| !names.is_empty() && depth < 6).and_then(exports);
        again.or_else(|| self.modules.contains_key(&module).then_some(module))
    }

    /// Sets of modules that import each other, directly or indirectly. A module's imports from its parents count as its own.
    fn circles(&self) -> Vec<BTreeSet<String>> {
        let imports = |(path, (_, all)): (&ModulePath, &(Vec<ModulePath>, Vec<ModulePath>))| {
            let found = all.iter().filter_map(|named| self.definer(path, named, 0));
            let others = found.filter(|other| other[0] == path[0] && !path.starts_with(other));
            (path.join("/"), others.map(|other| other.join("/")).collect())
        };
        let imports: BTreeMap<String, BTreeSet<String>> = self.modules.iter().map(imports).collect();
        let reached = |from: &String| {
            let (mut reached, mut next) = (BTreeSet::new(), vec![from]);
            while let Some(module) = next.pop() {
                next.extend(imports[module].iter().filter(|other| reached.insert((*other).clone())));
            }
            reached
        };
        let reached: BTreeMap<&String, BTreeSet<String>> = imports.keys().map(|from| (from, reached(from))).collect();
        let circle = |from: &String| -> BTreeSet<String> {
            reached[from].iter().filter(|other| reached[other].contains(from)).cloned().collect()
        };
        imports.keys().map(circle).filter(|circle| circle.len() > 1).collect::<BTreeSet<_>>().into_iter().collect()
    }
}

#[test]
fn files_of_a_module_have_no_circular_imports() {
    let circles = ModuleTree::new(&sources()).circles();
    assert!(circles.is_empty(), "move what is shared to a file of its own: {circles:#?}");
    let file = |name: &str, text: &str| (name.to_owned(), text.to_owned());
    let mut tree = vec![
        file("a/mod.rs", "mod b;\nmod c;\nmod d;\npub use c::Shape;\nuse d::Late;\nstruct Own;"),
        file("a/b.rs", "use super::{Own, Shape};"),
        file("a/c.rs", "use super::d::{self, Late};"),
        file("a/d.rs", "// use super::b;\n#[cfg(test)]\nmod tests {\n    use super::super::b::x;\n}\n"),
    ];
    assert!(ModuleTree::new(&tree).circles().is_empty());
    tree[3].1.push_str("fn f() {\n    crate::a::b::g();\n}");
    let circle = ["a/b", "a/c", "a/d"].map(str::to_owned);
    assert_eq!(ModuleTree::new(&tree).circles(), [BTreeSet::from(circle)]);
}
