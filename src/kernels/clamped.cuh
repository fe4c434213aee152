// The clamped SwiGLU: gate and up cut to a range, g sigmoid(1.702 g) (u + 1). A NaN stays one.
#pragma once
#include "scalar.cuh"

constexpr float SWISH_SLOPE = 1.702f;
constexpr float SWISH_LIMIT = 7.0f;

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float below_limit(float x) { return x > SWISH_LIMIT ? SWISH_LIMIT : x; }

// Of a gate that is cut already.
__device__ __forceinline__ float swish(float gate) { return gate * sigmoid(SWISH_SLOPE * gate); }

// What an activated gate is multiplied by.
__device__ __forceinline__ float clamped_factor(float up) { return (up < -SWISH_LIMIT ? -SWISH_LIMIT : below_limit(up)) + 1.0f; }

__device__ __forceinline__ float clamped_swiglu(float gate, float up) { return swish(below_limit(gate)) * clamped_factor(up); }
