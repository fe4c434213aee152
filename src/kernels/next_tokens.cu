// A step's token ids, some of which the previous step has sampled and the host does not know yet.

extern "C" __global__ void __launch_bounds__(256) next_tokens(
    const int* __restrict__ from,     // [S]: an id, or the bitwise complement of a row of `sampled`
    const int* __restrict__ sampled,  // [rows]
    int* __restrict__ token_ids,      // [S]
    long long count
) {
    const long long s = blockIdx.x * blockDim.x + threadIdx.x;
    if (s < count) token_ids[s] = from[s] >= 0 ? from[s] : sampled[~from[s]];
}
