// A step's token ids, of which the host may not know those that the step before has sampled.

extern "C" __global__ void __launch_bounds__(256) next_tokens(
    const int* __restrict__ from,     // [S]: an id, or the complement of a row of `sampled`
    const int* __restrict__ sampled,  // [rows]
    int* __restrict__ token_ids,      // [S]
    long long count
) {
    const long long s = blockIdx.x * blockDim.x + threadIdx.x;
    if (s < count) token_ids[s] = from[s] >= 0 ? from[s] : sampled[~from[s]];
}
