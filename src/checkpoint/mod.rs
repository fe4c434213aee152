//! Save, validate, resume and export. Knows nothing of generation.
