// C interface to parts of libtorch that exist only in C++. Every function that can fail returns 0 on success; on failure the reason is in
// colo_last_error(), valid on the same thread until the next call.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {
const char* colo_last_error();

// Makes CPU tensors come from malloc from now on.
void colo_allocate_from_heap();

// TCPStore. `listen_fd` is a bound and listening socket, which the store takes ownership of.
struct ColoStore;
int colo_store_host(const char* host, uint16_t port, int listen_fd, int64_t timeout_ms, ColoStore** store);
int colo_store_connect(const char* host, uint16_t port, int64_t timeout_ms, ColoStore** store);
void colo_store_free(ColoStore* store);
int colo_store_set(ColoStore* store, const char* key, const uint8_t* value, size_t bytes);
// The caller owns `value` and must free it with colo_bytes_free.
int colo_store_get(ColoStore* store, const char* key, uint8_t** value, size_t* bytes);
int colo_store_add(ColoStore* store, const char* key, int64_t delta, int64_t* sum);
int colo_store_wait(ColoStore* store, const char* const* keys, size_t num_keys, int64_t timeout_ms);
void colo_bytes_free(uint8_t* value);

// The raw CUstream on which libtorch currently queues operations for this device.
int colo_cuda_current_stream(int device, void** stream);
// Takes the next stream of libtorch's pool, as libtorch's id and as CUstream; blocks of an urgent stream are scheduled before others. It lives as
// long as the process.
int colo_cuda_pool_stream(int device, int urgent, int64_t* id, void** stream);
// Makes a stream current for libtorch's operations of this thread; `previous` is the one before.
int colo_cuda_exchange_stream(int device, int64_t id, int64_t* previous);
// Makes this device current for the calling thread.
int colo_cuda_set_device(int device);
// Releases the memory that libtorch's CUDA allocator caches.
int colo_cuda_release_cache();

// Bytes of this device in libtorch's allocator: allocated now, peak allocated, reserved now, peak reserved.
int colo_cuda_memory_stats(int device, int64_t* stats);
// Resets the two peaks.
int colo_cuda_reset_peak_memory(int device);

// Sets whether operations of this process use their deterministic variant. If `only` is not 0, those without one are refused.
int colo_set_deterministic(int on, int only);
int colo_is_deterministic();

// Attention of packed query runs to packed key runs. Tensors are at::Tensor*; the caller owns the two results. A negative window means none.
int colo_flash_attention_forward(
    const void* query, const void* key, const void* value, const void* cu_seqlens_q, const void* cu_seqlens_k,
    int64_t max_len_q, int64_t max_len_k, int causal, double scale, int64_t window_left, void** output, void** logsumexp);
// Attention of [batch, heads, length, width] through cuDNN; the caller owns the two results.
int colo_cudnn_attention_forward(
    const void* query, const void* key, const void* value, int causal, double scale, void** output, void** logsumexp);
}
