// Counter-based random words: Philox4x32-10, as in src/ops/random.rs.
#pragma once

// Four random words for a counter and a key.
__device__ __forceinline__ void philox(const unsigned (&key)[2], unsigned c0, unsigned c1, unsigned c2, unsigned c3,
                                       unsigned words[4]) {
    unsigned k0 = key[0], k1 = key[1];
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned long long p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
        c0 = static_cast<unsigned>(p1 >> 32) ^ c1 ^ k0, c1 = static_cast<unsigned>(p1);
        c2 = static_cast<unsigned>(p0 >> 32) ^ c3 ^ k1, c3 = static_cast<unsigned>(p0);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}
