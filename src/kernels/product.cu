// The GEMMs with few rows in bf16.
#include "few_rows.cuh"

PRODUCTS(product, Plain, Bf16)
PRODUCTS(product_silu_mul, SwiGlu, Bf16)
