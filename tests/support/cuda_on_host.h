// What a CUDA kernel's text needs to run on the host, a block at a time and a thread at a time.
//
// Each thread of a block is a fiber. Threads of a warp meet at shuffles, ballots and mma, threads of a
// block at __syncthreads(); between those each runs alone, warps in an order that differs every time.
// A kernel that a GPU would let go wrong in silence fails here with a message: threads that do not
// meet, addresses that are not aligned or outside an array, copies that nobody waited for.
//
// Instructions are written in kernels as asm statements. Each is a function here whose name is the
// instruction's and whose arguments stand in PTX's order, which follow the section of the PTX ISA that is
// named before each.

#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <utility>
#include <vector>

using std::size_t;

// An array that a kernel is called with, and how; as ctypes lays them out.
struct Array { char* data; size_t bytes; const int* shape; int dimensions; };
struct Launch { unsigned grid[3], block[3]; size_t shared_bytes; const Array* arrays; int count; };

// --- types and values that CUDA has ------------------------------------------------------------

struct dim3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static dim3 threadIdx, blockIdx, blockDim, gridDim;

struct bfloat16 {
  uint16_t bits;
  bfloat16() = default;
  explicit bfloat16(float value) {  // to the nearest, of two the even one
    uint32_t word;
    memcpy(&word, &value, 4);
    bits = std::isnan(value) ? 0x7fff : (word + 0x7fff + ((word >> 16) & 1)) >> 16;
  }
  operator float() const {
    const uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
  }
};

// One of the two bfloat16 in a register.
static float half_of(unsigned pair, int which) {
  bfloat16 value;
  value.bits = pair >> (16 * which);
  return value;
}

static int min(int one, int other) { return one < other ? one : other; }
static int __popc(unsigned bits) { return __builtin_popcount(bits); }
#define __expf expf  // glibc has declared the name
static float rsqrtf(float value) { return 1.0f / sqrtf(value); }

static float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static float __int_as_float(int bits) { return __uint_as_float(bits); }

// "Data Movement and Conversion Instructions: prmt": each four bits of the selector name a byte of (high, low).
static unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = ((uint64_t)high << 32) | low;
  unsigned result = 0;
  for (int at = 0; at < 4; at++)
    result |= (unsigned)((bytes >> (8 * ((selector >> (4 * at)) & 7))) & 255) << (8 * at);
  return result;
}

// --- threads -------------------------------------------------------------------------------------

#define __device__ static
// Static shared memory: what stands in one section can be wiped before each block.
#define __shared__ static __attribute__((section("block_shared")))
__shared__ int block_shared_is_there;
extern "C" char __start_block_shared[] __attribute__((visibility("hidden")));
extern "C" char __stop_block_shared[] __attribute__((visibility("hidden")));

constexpr int WARP = 32, STACK_BYTES = 1 << 16, MOST_THREADS = 1024, MOST_SHARED_BYTES = 232448;  // of an H200
constexpr int WIPED = 0xff;  // a NaN as bfloat16 or float, -1 as a number

struct Copy { char* to; char bytes[16]; };

enum State { READY, AT_WARP, AT_BLOCK, DONE };

struct Thread {
  ucontext_t context;
  dim3 index;
  State state = READY;
  unsigned shown[6];                    // what its warp may look at
  std::vector<Copy> begun;              // copies of no group yet
  std::deque<std::vector<Copy>> groups; // of copies in flight, the oldest first
};

static std::vector<Thread> threads;
static int current;
static ucontext_t scheduler;
static std::function<void()> kernel;
static const char* failure;
static const Launch* launch;
alignas(256) static char dynamic_shared[MOST_SHARED_BYTES];
alignas(16) static char stacks[MOST_THREADS][STACK_BYTES];

static void pause(State state) {
  threads[current].state = state;
  swapcontext(&threads[current].context, &scheduler);
}

static void require(bool is_so, const char* otherwise) {
  if (is_so) return;
  failure = otherwise;
  pause(DONE);
}

static void run_thread() {
  kernel();
  pause(DONE);
}

static void __syncthreads() { pause(AT_BLOCK); }

// What thread `lane` of this warp shows.
static const unsigned* shown_by(int lane) { return threads[current / WARP * WARP + lane].shown; }

static unsigned __ballot_sync(unsigned, bool is_so) {
  threads[current].shown[0] = is_so;
  pause(AT_WARP);
  unsigned all = 0;
  for (int lane = 0; lane < WARP; lane++) all |= shown_by(lane)[0] << lane;
  pause(AT_WARP);
  return all;
}

static bool __any_sync(unsigned mask, bool is_so) { return __ballot_sync(mask, is_so) != 0; }

template <class Value>
static Value __shfl_xor_sync(unsigned, Value value, int apart) {
  static_assert(sizeof(Value) == 4, "a register");
  memcpy(threads[current].shown, &value, 4);
  pause(AT_WARP);
  Value other;
  memcpy(&other, shown_by((current % WARP) ^ apart), 4);
  pause(AT_WARP);
  return other;
}

// --- instructions --------------------------------------------------------------------------------

// "Half Precision Floating Point Instructions: fma". A product of two bfloat16 is exact in a double.
static void fma_rn_bf16x2(unsigned& result, unsigned a, unsigned b, unsigned c) {
  unsigned both = 0;
  for (int at = 0; at < 2; at++) {
    const double sum = (double)half_of(a, at) * half_of(b, at) + half_of(c, at);
    both |= (unsigned)bfloat16((float)sum).bits << (16 * at);
  }
  result = both;
}

// "Matrix Fragments for mma.m16n8k16 with floating point type". Of thread `lane`, with near = lane / 4
// and two = lane % 4 * 2: a0 has row near and columns two and two + 1 of A, a1 row near + 8, a2 and a3 the
// same eight columns on; b0 has rows two and two + 1 of column near of B, b1 those eight rows on; c0 and
// c1 have row near and columns two and two + 1 of C, c2 and c3 row near + 8.
static void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(
    float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
    unsigned b0, unsigned b1, float c0, float c1, float c2, float c3) {
  const unsigned own[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(threads[current].shown, own, sizeof own);
  pause(AT_WARP);
  const int near = current % WARP / 4, two = current % 4 * 2;
  auto a = [](int row, int column) {
    return half_of(shown_by(row % 8 * 4 + column % 8 / 2)[row / 8 + column / 8 * 2], column % 2);
  };
  auto b = [](int row, int column) {
    return half_of(shown_by(column * 4 + row % 8 / 2)[4 + row / 8], row % 2);
  };
  float* results[4] = {&d0, &d1, &d2, &d3};
  const float before[4] = {c0, c1, c2, c3};
  for (int at = 0; at < 4; at++) {
    double sum = before[at];
    for (int inner = 0; inner < 16; inner++)
      sum += (double)a(near + at / 2 * 8, inner) * b(inner, two + at % 2);
    *results[at] = (float)sum;
  }
  pause(AT_WARP);
}

// An address in shared memory is counted from the beginning of the block's own.
static size_t __cvta_generic_to_shared(const void* address) { return (const char*)address - dynamic_shared; }

// "Data Movement and Conversion Instructions: cp.async": of `size` bytes the first `there` are copied, the
// others are zero. Nothing is known of the destination until the copy was waited for: it is wiped.
static void cp_async_cg_shared_global(size_t to, const void* from, int size, int there) {
  const char* source = (const char*)from;
  require(size == 16 && there >= 0 && there <= size, "cp.async.cg copies 16 bytes");
  require(to % 16 == 0 && (uintptr_t)source % 16 == 0, "cp.async at an address that is not aligned");
  require(to + size <= launch->shared_bytes, "cp.async to outside of shared memory");
  bool is_inside = false;
  for (int at = 0; at < launch->count; at++) {
    const Array& array = launch->arrays[at];
    is_inside |= source >= array.data && source + size <= array.data + array.bytes;
  }
  require(is_inside, "cp.async from outside of every array");
  Copy copy = {dynamic_shared + to, {}};
  memcpy(copy.bytes, source, there);
  memset(copy.to, WIPED, size);
  threads[current].begun.push_back(copy);
}

// The same, cp.async.commit_group.
static void cp_async_commit_group() {
  Thread& thread = threads[current];
  thread.groups.push_back(std::move(thread.begun));
  thread.begun.clear();
}

// The same, cp.async.wait_group: at most `pending` of the last groups are still in flight.
static void cp_async_wait_group(size_t pending) {
  auto& groups = threads[current].groups;
  for (; groups.size() > pending; groups.pop_front())
    for (const Copy& copy : groups.front()) memcpy(copy.to, copy.bytes, sizeof copy.bytes);
}

// --- launching -----------------------------------------------------------------------------------

static int count_of(State state, int first, int count) {
  int found = 0;
  for (int at = first; at < first + count; at++) found += threads[at].state == state;
  return found;
}

static void wake(int first, int count) {
  for (int at = first; at < first + count; at++) threads[at].state = READY;
}

// A warp, until each of its threads is at a barrier of the block or done.
static void run_warp(int first, bool is_backwards) {
  while (!failure) {
    for (int at = 0; at < WARP && !failure; at++) {
      current = first + (is_backwards ? WARP - 1 - at : at);
      if (threads[current].state != READY) continue;
      threadIdx = threads[current].index;
      swapcontext(&scheduler, &threads[current].context);
    }
    const int met = count_of(AT_WARP, first, WARP);
    if (met == 0) return;
    if (met != WARP) failure = "threads of a warp did not meet";
    wake(first, WARP);
  }
}

static void run_block() {
  static uint32_t noise = 1;
  const int count = blockDim.x * blockDim.y * blockDim.z;
  memset(dynamic_shared, WIPED, launch->shared_bytes);
  memset(__start_block_shared, WIPED, __stop_block_shared - __start_block_shared);
  threads.clear();
  threads.resize(count);
  for (int at = 0; at < count; at++) {
    Thread& thread = threads[at];
    thread.index = {at % blockDim.x, at / blockDim.x % blockDim.y, at / (blockDim.x * blockDim.y)};
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stacks[at];
    thread.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&thread.context, run_thread, 0);
  }
  std::vector<int> order;
  for (int first = 0; first < count; first += WARP) order.push_back(first);
  while (!failure && count_of(DONE, 0, count) < count) {
    for (size_t left = order.size(); left > 0; left--) {
      noise = noise * 1664525 + 1013904223;
      std::swap(order[left - 1], order[(noise >> 8) % left]);
    }
    for (int first : order) run_warp(first, noise >> 31);
    if (count_of(DONE, 0, count) == count) break;
    if (!failure && count_of(AT_BLOCK, 0, count) != count) failure = "threads of a block did not meet";
    wake(0, count);
  }
  for (const Thread& thread : threads)
    for (const auto& group : thread.groups)
      if (!failure && !group.empty()) failure = "copies that nobody waited for";
  for (const Thread& thread : threads)
    if (!failure && !thread.begun.empty()) failure = "copies that are of no group";
}

// All blocks of a grid. What went wrong, or nullptr.
static const char* run_grid(const Launch& asked, std::function<void()> text) {
  launch = &asked;
  kernel = text;
  failure = nullptr;
  gridDim = {asked.grid[0], asked.grid[1], asked.grid[2]};
  blockDim = {asked.block[0], asked.block[1], asked.block[2]};
  const unsigned count = blockDim.x * blockDim.y * blockDim.z;
  if (count % WARP || count > MOST_THREADS) return "a block has whole warps, and up to 1,024 threads";
  if (gridDim.y > 65535 || gridDim.z > 65535) return "a grid has up to 65,535 blocks in y and in z";
  if (asked.shared_bytes > MOST_SHARED_BYTES) return "more shared memory than a block may have";
  for (unsigned z = 0; z < gridDim.z; z++)
    for (unsigned y = 0; y < gridDim.y; y++)
      for (unsigned x = 0; x < gridDim.x && !failure; x++) {
        blockIdx = {x, y, z};
        run_block();
      }
  return failure;
}
