// The GEMMs with few rows in e4m3 with one scale per row.
#include "few_rows.cuh"

PRODUCTS(product_fp8, Plain, E4m3)
PRODUCTS(product_silu_mul_fp8, SwiGlu, E4m3)
