// The step from a sampled token to the next one's inputs. One block, which also moves the ring of outputs on.
#include "scalar.cuh"

constexpr int RUNNING = 0, EOS = 1, LENGTH = 2, NON_FINITE = 3, NO_BLOCK = 4;  // as in src/cuda/kernels/advance.rs

extern "C" __global__ void __launch_bounds__(1024) advance(
    const int* __restrict__ sampled,       // [S], -1: logits were not finite
    const float* __restrict__ logprobs,    // [S]
    int* __restrict__ token_ids,           // [S] next input
    int* __restrict__ positions,           // [S] its position
    int* __restrict__ context_lens,        // [S], the next input included; 0: no sequence
    int* __restrict__ slots,               // [S] where its key and value go; -1: nowhere
    const int* __restrict__ block_tables,  // [S, max_blocks], -1: none
    const int* __restrict__ limits,        // [S] tokens of prompt and completion at which a sequence ends
    const int* __restrict__ eos,           // [E]
    unsigned* __restrict__ seen,           // [S, words] bits by id, or null
    int* __restrict__ output,              // [ring, S, 4]: token or -1, log-prob's bits, status, tokens so far
    long long* __restrict__ step,          // [1]
    long long rows, long long max_blocks, long long block_size, long long num_eos, long long words, long long ring
) {
    wait_for_inputs();
    int* out = output + *step % ring * rows * 4;
    for (long long s = threadIdx.x; s < rows; s += blockDim.x) {
        const int len = context_lens[s], token = sampled[s];
        if (len == 0) {
            out[4 * s] = -1, out[4 * s + 1] = 0, out[4 * s + 2] = RUNNING, out[4 * s + 3] = 0;
            continue;
        }
        int status = token < 0 ? NON_FINITE : RUNNING;
        for (long long i = 0; i < num_eos; ++i)
            if (token == eos[i]) status = EOS;
        if (status == RUNNING && len + 1 >= limits[s]) status = LENGTH;
        // The token will stand at position `len`; the last of a sequence needs no room.
        const long long place = len / block_size;
        const int block = place < max_blocks ? block_tables[s * max_blocks + place] : -1;
        if (status == RUNNING && block < 0) status = NO_BLOCK;
        out[4 * s] = token, out[4 * s + 1] = __float_as_int(logprobs[s]), out[4 * s + 2] = status, out[4 * s + 3] = len + 1;
        if (seen && token >= 0) seen[s * words + token / 32] |= 1u << (token % 32);
        const bool goes_on = status == RUNNING;
        token_ids[s] = goes_on ? token : 0;
        positions[s] = goes_on ? len : 0;
        context_lens[s] = goes_on ? len + 1 : 0;
        slots[s] = goes_on ? block * static_cast<int>(block_size) + len % static_cast<int>(block_size) : -1;
    }
    __syncthreads();  // all have read the step
    if (threadIdx.x == 0) ++*step;
}
