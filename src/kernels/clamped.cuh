// The clamped SwiGLU: gate and up are clamped, g sigmoid(1.702 g) (u + 1). NaN is kept.
#pragma once
#include "scalar.cuh"

constexpr float SWISH_SLOPE = 1.702f;
constexpr float SWISH_LIMIT = 7.0f;

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float below_limit(float x) { return x > SWISH_LIMIT ? SWISH_LIMIT : x; }

// For a gate that is already clamped.
__device__ __forceinline__ float swish(float gate) { return gate * sigmoid(SWISH_SLOPE * gate); }

// The number by which the activated gate is multiplied.
__device__ __forceinline__ float clamped_factor(float up) { return (up < -SWISH_LIMIT ? -SWISH_LIMIT : below_limit(up)) + 1.0f; }

__device__ __forceinline__ float clamped_swiglu(float gate, float up) { return swish(below_limit(gate)) * clamped_factor(up); }
