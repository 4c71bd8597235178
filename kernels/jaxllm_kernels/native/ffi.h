// Turns a call of XLA's into a call of a C++ function: operands, results and attributes become its
// parameters.
//
// XLA's own header for this has 4,000 lines of templates. Compiling it takes longer than compiling
// a kernel, in every part of the library. So this file offers what the kernels need, and uses
// XLA's interface in C.

#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <tuple>
#include <utility>

#include "xla/ffi/api/c_api.h"

namespace jaxllm::ffi {

using DataType = XLA_FFI_DataType;
constexpr DataType PRED = XLA_FFI_DataType_PRED, S8 = XLA_FFI_DataType_S8,
                   S16 = XLA_FFI_DataType_S16, S32 = XLA_FFI_DataType_S32,
                   S64 = XLA_FFI_DataType_S64, U8 = XLA_FFI_DataType_U8,
                   U16 = XLA_FFI_DataType_U16, U32 = XLA_FFI_DataType_U32,
                   F32 = XLA_FFI_DataType_F32, BF16 = XLA_FFI_DataType_BF16;

// The C++ type of an element. For BF16 it is the type of its bits.
template <DataType kType> struct ElementOf;
template <> struct ElementOf<PRED> { using Type = bool; };
template <> struct ElementOf<S8> { using Type = int8_t; };
template <> struct ElementOf<S16> { using Type = int16_t; };
template <> struct ElementOf<S32> { using Type = int32_t; };
template <> struct ElementOf<U8> { using Type = uint8_t; };
template <> struct ElementOf<U16> { using Type = uint16_t; };
template <> struct ElementOf<U32> { using Type = uint32_t; };
template <> struct ElementOf<F32> { using Type = float; };
template <> struct ElementOf<BF16> { using Type = uint16_t; };

// What a function returns.
class Error {
 public:
  static Error Success() { return Error(nullptr); }
  static Error InvalidArgument(const char* message) { return Error(message); }

  XLA_FFI_Error* ForXla(const XLA_FFI_Api* api) const {
    if (message_ == nullptr) return nullptr;
    XLA_FFI_Error_Create_Args args{};
    args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
    args.message = message_;
    args.errc = XLA_FFI_Error_Code_INVALID_ARGUMENT;
    return api->XLA_FFI_Error_Create(&args);
  }

 private:
  explicit Error(const char* message) : message_(message) {}

  const char* message_;  // null: none
};

struct Dimensions {
  const int64_t* sizes;
  size_t rank;

  int64_t operator[](size_t axis) const { return sizes[axis]; }
  size_t size() const { return rank; }
};

// An array of any rank whose elements take a byte each.
class Bytes {
 public:
  explicit Bytes(const XLA_FFI_Buffer* buffer) : buffer_(buffer) {}

  static bool Is(const XLA_FFI_Buffer& buffer) {
    return buffer.dtype == U8 || buffer.dtype == S8 ||
           buffer.dtype == XLA_FFI_DataType_F8E4M3FN;
  }
  void* untyped_data() const { return buffer_->data; }
  Dimensions dimensions() const { return {buffer_->dims, size_t(buffer_->rank)}; }
  size_t element_count() const {
    size_t count = 1;
    for (int64_t axis = 0; axis < buffer_->rank; ++axis) count *= buffer_->dims[axis];
    return count;
  }

 private:
  const XLA_FFI_Buffer* buffer_;
};

template <DataType kType, int kRank>
class Buffer : public Bytes {
 public:
  using Bytes::Bytes;

  static bool Is(const XLA_FFI_Buffer& buffer) {
    return buffer.dtype == kType && buffer.rank == kRank;
  }
  auto* typed_data() const {
    return static_cast<typename ElementOf<kType>::Type*>(untyped_data());
  }
};

template <DataType kType, int kRank>
class ResultBuffer {
 public:
  explicit ResultBuffer(const XLA_FFI_Buffer* buffer) : buffer_(buffer) {}

  static bool Is(const XLA_FFI_Buffer& buffer) { return Buffer<kType, kRank>::Is(buffer); }
  const Buffer<kType, kRank>* operator->() const { return &buffer_; }

 private:
  Buffer<kType, kRank> buffer_;
};

// The operands behind those that a function names.
class RemainingArgs {
 public:
  RemainingArgs(const XLA_FFI_Args* args, int64_t first) : args_(args), first_(first) {}

  size_t size() const { return args_->size - first_; }
  // One of them; none if there is none of this type.
  template <typename Type>
  std::optional<Type> get(size_t index) const {
    if (index >= size()) return std::nullopt;
    auto* buffer = static_cast<const XLA_FFI_Buffer*>(args_->args[first_ + index]);
    if (!Type::Is(*buffer)) return std::nullopt;
    return Type(buffer);
  }

 private:
  const XLA_FFI_Args* args_;
  int64_t first_;
};

// The threads that XLA computes with.
class ThreadPool {
 public:
  explicit ThreadPool(const XLA_FFI_CallFrame& frame) : api_(frame.api), context_(frame.ctx) {}

  int64_t num_threads() const {
    int64_t number = 0;
    XLA_FFI_ThreadPool_NumThreads_Args args{};
    args.struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE;
    args.ctx = context_;
    args.num_threads = &number;
    return Succeeds(api_->XLA_FFI_ThreadPool_NumThreads(&args)) && number > 0 ? number : 1;
  }

  // Let a thread call `work` later. Without a pool this thread calls it now.
  template <typename Work>
  void Schedule(Work work) {
    XLA_FFI_ThreadPool_Schedule_Args args{};
    args.struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE;
    args.ctx = context_;
    args.task = [](void* data) {
      auto* taken = static_cast<Work*>(data);
      (*taken)();
      delete taken;
    };
    args.data = new Work(std::move(work));
    if (!Succeeds(api_->XLA_FFI_ThreadPool_Schedule(&args))) args.task(args.data);
  }

 private:
  bool Succeeds(XLA_FFI_Error* error) const {
    if (error == nullptr) return true;
    XLA_FFI_Error_Destroy_Args args{};
    args.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
    args.error = error;
    api_->XLA_FFI_Error_Destroy(&args);
    return false;
  }

  const XLA_FFI_Api* api_;
  decltype(XLA_FFI_CallFrame::ctx) context_;
};

template <typename Type> struct Tag {};

// Reads the parameters of a function from a call, in their order.
class Reader {
 public:
  Reader(const XLA_FFI_CallFrame& frame, std::initializer_list<const char*> attributes)
      : frame_(frame), attribute_(attributes.begin()), end_(attributes.end()) {}

  ThreadPool Read(Tag<ThreadPool>) { return ThreadPool(frame_); }
  RemainingArgs Read(Tag<RemainingArgs>) {
    const int64_t first = num_args_;
    num_args_ = frame_.args.size;
    return RemainingArgs(&frame_.args, first);
  }
  template <DataType kType, int kRank>
  ResultBuffer<kType, kRank> Read(Tag<ResultBuffer<kType, kRank>>) {
    const auto* buffer = Next(frame_.rets.rets, frame_.rets.size, num_results_);
    return ResultBuffer<kType, kRank>(Checked<ResultBuffer<kType, kRank>>(buffer));
  }
  float Read(Tag<float>) { return Attribute<float>(F32); }
  int64_t Read(Tag<int64_t>) { return Attribute<int64_t>(S64); }
  bool Read(Tag<bool>) { return Attribute<bool>(PRED); }
  template <typename Type>
  Type Read(Tag<Type>) {
    return Type(Checked<Type>(Next(frame_.args.args, frame_.args.size, num_args_)));
  }

  // Whether the call has just what was read.
  bool fits() const {
    return fits_ && num_args_ == frame_.args.size && num_results_ == frame_.rets.size &&
           num_attributes_ == frame_.attrs.size && attribute_ == end_;
  }

 private:
  static const XLA_FFI_Buffer* Next(void** buffers, int64_t size, int64_t& index) {
    if (index >= size) return nullptr;
    return static_cast<const XLA_FFI_Buffer*>(buffers[index++]);
  }

  template <typename Type>
  const XLA_FFI_Buffer* Checked(const XLA_FFI_Buffer* buffer) {
    fits_ &= buffer != nullptr && Type::Is(*buffer);
    return buffer;
  }

  template <typename Value>
  Value Attribute(DataType type) {
    const char* name = attribute_ == end_ ? "" : *attribute_++;
    ++num_attributes_;
    const XLA_FFI_Attrs& all = frame_.attrs;
    for (int64_t i = 0; i < all.size; ++i) {
      if (all.names[i]->len != std::strlen(name) ||
          std::memcmp(all.names[i]->ptr, name, all.names[i]->len) != 0)
        continue;
      const auto* scalar = static_cast<const XLA_FFI_Scalar*>(all.attrs[i]);
      if (all.types[i] == XLA_FFI_AttrType_SCALAR && scalar->dtype == type)
        return *static_cast<const Value*>(scalar->value);
    }
    fits_ = false;
    return Value{};
  }

  const XLA_FFI_CallFrame& frame_;
  const char *const *attribute_, *const *end_;
  int64_t num_args_ = 0, num_results_ = 0, num_attributes_ = 0;
  bool fits_ = true;
};

// Call a function for XLA. Its attributes have these names, in the order of its parameters.
template <typename... Parameters>
XLA_FFI_Error* Call(XLA_FFI_CallFrame* frame, Error (*function)(Parameters...),
                    std::initializer_list<const char*> attributes) {
  // XLA asks for which version of its interface a function was compiled.
  if (frame->extension_start && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
    auto* metadata =
        reinterpret_cast<XLA_FFI_Metadata_Extension*>(frame->extension_start)->metadata;
    metadata->api_version = {};
    metadata->api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    metadata->traits = 0;
    metadata->state_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
    return nullptr;
  }
  Reader reader(*frame, attributes);
  std::tuple<Parameters...> parameters{reader.Read(Tag<Parameters>())...};  // in this order
  if (!reader.fits())
    return Error::InvalidArgument("the operands are not the function's").ForXla(frame->api);
  return std::apply(function, parameters).ForXla(frame->api);
}

}  // namespace jaxllm::ffi

// A function of the library that XLA may call: its symbol, the function, and names of attributes.
#define JAXLLM_FUNCTION(symbol, function, ...)                              \
  extern "C" XLA_FFI_Error* symbol(XLA_FFI_CallFrame* frame) {              \
    return ::jaxllm::ffi::Call(frame, function, {__VA_ARGS__});             \
  }
