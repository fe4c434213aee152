#include "shim.h"

#include <ATen/Context.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {
// Keeps libtorch from printing stack traces about sockets while a store exists, because the exceptions have all relevant information.
// TORCH_CPP_LOG_LEVEL turns them on again.
class Quiet {
 public:
  Quiet() {
    const std::lock_guard<std::mutex> guard(mutex);
    if (num_alive++ == 0) {
      level_before = FLAGS_caffe2_log_level;
      if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) {
        FLAGS_caffe2_log_level = static_cast<int>(c10::GLOG_FATAL);
      }
    }
  }
  ~Quiet() {
    const std::lock_guard<std::mutex> guard(mutex);
    if (--num_alive == 0) {
      FLAGS_caffe2_log_level = level_before;
    }
  }
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;

 private:
  static inline std::mutex mutex;
  static inline int num_alive = 0;
  static inline int level_before = 0;
};
} // namespace

struct ColoStore {
  Quiet quiet;
  c10::intrusive_ptr<c10d::TCPStore> inner;
};

namespace {
thread_local std::string last_error;

// No exception may cross into Rust.
template <typename Work>
int guarded(Work work) {
  try {
    work();
    return 0;
  } catch (const c10::Error& error) {
    last_error = error.what_without_backtrace();
  } catch (const std::exception& error) {
    last_error = error.what();
  } catch (...) {
    last_error = "unknown C++ exception";
  }
  return 1;
}

ColoStore* open_store(const char* host, c10d::TCPStoreOptions options, uint16_t port, int64_t timeout_ms) {
  options.port = port;
  options.waitWorkers = false;
  options.timeout = std::chrono::milliseconds(timeout_ms);
  auto store = std::make_unique<ColoStore>();
  store->inner = c10::make_intrusive<c10d::TCPStore>(std::string(host), options);
  return store.release();
}

c10::Device cuda_device(int device) {
  return c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device));
}

at::Tensor tensor(const void* pointer) {
  return *static_cast<const at::Tensor*>(pointer);
}

// Aligned memory from malloc. libtorch's own CPU allocator calls posix_memalign, which before glibc 2.38 requests more than it keeps: the place of a
// freed tensor is then too small for the next one of its size once a small allocation follows it, and the heap grows at every step.
class HeapAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    constexpr size_t alignment = 64; // as libtorch's own
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) {
      return {nullptr, nullptr, &release, cpu};
    }
    const size_t extra = alignment + sizeof(void*);
    void* block = bytes + extra > bytes ? std::malloc(bytes + extra) : nullptr;
    TORCH_CHECK(block != nullptr, "HeapAllocator: can't allocate memory: you tried to allocate ", bytes, " bytes.");
    void* aligned = static_cast<char*>(block) + sizeof(void*);
    size_t room = bytes + alignment;
    std::align(alignment, bytes, aligned, room);
    static_cast<void**>(aligned)[-1] = block;
    return {aligned, aligned, &release, cpu}; // the context is the data, as raw_allocate asks
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* dest, const void* src, std::size_t bytes) const override {
    default_copy_data(dest, src, bytes);
  }

 private:
  // The pointer to malloc's block is stored in front of the aligned memory.
  static void release(void* aligned) {
    if (aligned != nullptr) {
      std::free(static_cast<void**>(aligned)[-1]);
    }
  }
};
} // namespace

extern "C" {

const char* colo_last_error() {
  return last_error.c_str();
}

void colo_allocate_from_heap() {
  static HeapAllocator allocator;
  c10::SetCPUAllocator(&allocator);
}

int colo_store_host(const char* host, uint16_t port, int listen_fd, int64_t timeout_ms, ColoStore** store) {
  return guarded([&] {
    c10d::TCPStoreOptions options;
    options.isServer = true;
    options.masterListenFd = listen_fd;
    *store = open_store(host, options, port, timeout_ms);
  });
}

int colo_store_connect(const char* host, uint16_t port, int64_t timeout_ms, ColoStore** store) {
  return guarded([&] { *store = open_store(host, c10d::TCPStoreOptions{}, port, timeout_ms); });
}

void colo_store_free(ColoStore* store) {
  guarded([&] { delete store; });
}

int colo_store_set(ColoStore* store, const char* key, const uint8_t* value, size_t bytes) {
  return guarded([&] { store->inner->set(key, std::vector<uint8_t>(value, value + bytes)); });
}

int colo_store_get(ColoStore* store, const char* key, uint8_t** value, size_t* bytes) {
  return guarded([&] {
    const std::vector<uint8_t> got = store->inner->get(key);
    auto* copy = static_cast<uint8_t*>(std::malloc(got.empty() ? 1 : got.size()));
    if (copy == nullptr) {
      throw std::bad_alloc();
    }
    std::memcpy(copy, got.data(), got.size());
    *value = copy;
    *bytes = got.size();
  });
}

int colo_store_add(ColoStore* store, const char* key, int64_t delta, int64_t* sum) {
  return guarded([&] { *sum = store->inner->add(key, delta); });
}

int colo_store_wait(ColoStore* store, const char* const* keys, size_t num_keys, int64_t timeout_ms) {
  return guarded([&] {
    store->inner->wait(std::vector<std::string>(keys, keys + num_keys), std::chrono::milliseconds(timeout_ms));
  });
}

void colo_bytes_free(uint8_t* value) {
  std::free(value);
}

int colo_cuda_current_stream(int device, void** stream) {
  return guarded([&] {
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    const auto current = guard.getStream(cuda_device(device));
    *stream = guard.getStreamNativeHandle(current);
  });
}

int colo_cuda_pool_stream(int device, int urgent, int64_t* id, void** stream) {
  return guarded([&] {
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    const c10::Stream next = guard.getStreamFromGlobalPool(cuda_device(device), /*isHighPriority=*/urgent != 0);
    *id = next.id();
    *stream = guard.getStreamNativeHandle(next);
  });
}

int colo_cuda_exchange_stream(int device, int64_t id, int64_t* previous) {
  return guarded([&] {
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    *previous = guard.exchangeStream(c10::Stream(c10::Stream::UNSAFE, cuda_device(device), id)).id();
  });
}

int colo_cuda_set_device(int device) {
  return guarded([&] {
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    guard.setDevice(cuda_device(device));
  });
}

int colo_cuda_release_cache() {
  return guarded([&] { c10::getDeviceAllocator(c10::DeviceType::CUDA)->emptyCache(); });
}

int colo_cuda_memory_stats(int device, int64_t* stats) {
  return guarded([&] {
    using c10::CachingAllocator::StatType;
    const auto held =
        c10::getDeviceAllocator(c10::DeviceType::CUDA)->getDeviceStats(static_cast<c10::DeviceIndex>(device));
    const auto all = static_cast<size_t>(StatType::AGGREGATE);
    stats[0] = held.allocated_bytes[all].current;
    stats[1] = held.allocated_bytes[all].peak;
    stats[2] = held.reserved_bytes[all].current;
    stats[3] = held.reserved_bytes[all].peak;
  });
}

int colo_cuda_reset_peak_memory(int device) {
  return guarded([&] {
    c10::getDeviceAllocator(c10::DeviceType::CUDA)->resetPeakStats(static_cast<c10::DeviceIndex>(device));
  });
}

int colo_set_deterministic(int on, int only) {
  return guarded([&] {
    at::globalContext().setDeterministicAlgorithms(on != 0, /*warn_only=*/only == 0);
    at::globalContext().setDeterministicFillUninitializedMemory(false);
  });
}

int colo_is_deterministic() {
  return at::globalContext().deterministicAlgorithms() ? 1 : 0;
}

int colo_flash_attention_forward(
    const void* query,
    const void* key,
    const void* value,
    const void* cu_seqlens_q,
    const void* cu_seqlens_k,
    int64_t max_len_q,
    int64_t max_len_k,
    int causal,
    double scale,
    int64_t window_left,
    void** output,
    void** logsumexp) {
  return guarded([&] {
    auto result = at::_flash_attention_forward(
        tensor(query), tensor(key), tensor(value), tensor(cu_seqlens_q), tensor(cu_seqlens_k), max_len_q, max_len_k,
        /*dropout_p=*/0.0, causal != 0, /*return_debug_mask=*/false, scale,
        window_left < 0 ? std::nullopt : std::make_optional(window_left));
    *logsumexp = new at::Tensor(std::move(std::get<1>(result)));
    *output = new at::Tensor(std::move(std::get<0>(result)));
  });
}

int colo_cudnn_attention_forward(
    const void* query,
    const void* key,
    const void* value,
    int causal,
    double scale,
    void** output,
    void** logsumexp) {
  return guarded([&] {
    auto result = at::_scaled_dot_product_cudnn_attention(
        tensor(query), tensor(key), tensor(value), /*attn_bias=*/std::nullopt, /*compute_log_sumexp=*/true,
        /*dropout_p=*/0.0, causal != 0, /*return_debug_mask=*/false, scale);
    *logsumexp = new at::Tensor(std::move(std::get<1>(result)));
    *output = new at::Tensor(std::move(std::get<0>(result)));
  });
}
}
