// The GEMMs with few rows in int8 with one scale per row.
#include "few_rows.cuh"

PRODUCTS(product_int8, Plain, Int8)
PRODUCTS(product_silu_mul_int8, SwiGlu, Int8)
