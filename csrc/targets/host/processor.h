// The instruction sets that a compiler may use of its own accord (AES and the like need intrinsics, which there are none of),
// and how a processor tells that it has them.
#pragma once

#if defined(__x86_64__)

// name, macro of the compiler, leaf and subleaf of cpuid, register (0 to 3: eax to edx), bit, state that the operating
// system must save (bits of XCR0: 0x6 for 256-bit registers, 0xe6 for 512-bit ones).
#define MOK_INSTRUCTION_SETS(X)                                \
  X(sse3, __SSE3__, 1u, 0u, 2, 0, 0)                           \
  X(ssse3, __SSSE3__, 1u, 0u, 2, 9, 0)                         \
  X(sse4_1, __SSE4_1__, 1u, 0u, 2, 19, 0)                      \
  X(sse4_2, __SSE4_2__, 1u, 0u, 2, 20, 0)                      \
  X(popcnt, __POPCNT__, 1u, 0u, 2, 23, 0)                      \
  X(movbe, __MOVBE__, 1u, 0u, 2, 22, 0)                        \
  X(avx, __AVX__, 1u, 0u, 2, 28, 0x6)                          \
  X(f16c, __F16C__, 1u, 0u, 2, 29, 0x6)                        \
  X(fma, __FMA__, 1u, 0u, 2, 12, 0x6)                          \
  X(bmi, __BMI__, 7u, 0u, 1, 3, 0)                             \
  X(avx2, __AVX2__, 7u, 0u, 1, 5, 0x6)                         \
  X(bmi2, __BMI2__, 7u, 0u, 1, 8, 0)                           \
  X(avx512f, __AVX512F__, 7u, 0u, 1, 16, 0xe6)                 \
  X(avx512dq, __AVX512DQ__, 7u, 0u, 1, 17, 0xe6)               \
  X(avx512ifma, __AVX512IFMA__, 7u, 0u, 1, 21, 0xe6)           \
  X(avx512cd, __AVX512CD__, 7u, 0u, 1, 28, 0xe6)               \
  X(avx512bw, __AVX512BW__, 7u, 0u, 1, 30, 0xe6)               \
  X(avx512vl, __AVX512VL__, 7u, 0u, 1, 31, 0xe6)               \
  X(avx512vbmi, __AVX512VBMI__, 7u, 0u, 2, 1, 0xe6)            \
  X(avx512vbmi2, __AVX512VBMI2__, 7u, 0u, 2, 6, 0xe6)          \
  X(gfni, __GFNI__, 7u, 0u, 2, 8, 0)                           \
  X(avx512vnni, __AVX512VNNI__, 7u, 0u, 2, 11, 0xe6)           \
  X(avx512bitalg, __AVX512BITALG__, 7u, 0u, 2, 12, 0xe6)       \
  X(avx512vpopcntdq, __AVX512VPOPCNTDQ__, 7u, 0u, 2, 14, 0xe6) \
  X(avx512fp16, __AVX512FP16__, 7u, 0u, 3, 23, 0xe6)           \
  X(avxvnni, __AVXVNNI__, 7u, 1u, 0, 4, 0x6)                   \
  X(avx512bf16, __AVX512BF16__, 7u, 1u, 0, 5, 0xe6)            \
  X(avxifma, __AVXIFMA__, 7u, 1u, 0, 23, 0x6)                  \
  X(avxvnniint8, __AVXVNNIINT8__, 7u, 1u, 3, 4, 0x6)           \
  X(avxneconvert, __AVXNECONVERT__, 7u, 1u, 3, 5, 0x6)         \
  X(avxvnniint16, __AVXVNNIINT16__, 7u, 1u, 3, 10, 0x6)        \
  X(apxf, __APX_F__, 7u, 1u, 3, 21, 0x80000)                   \
  X(lzcnt, __LZCNT__, 0x80000001u, 0u, 2, 5, 0)                \
  X(sse4a, __SSE4A__, 0x80000001u, 0u, 2, 6, 0)                \
  X(xop, __XOP__, 0x80000001u, 0u, 2, 11, 0x6)                 \
  X(fma4, __FMA4__, 0x80000001u, 0u, 2, 16, 0x6)               \
  X(tbm, __TBM__, 0x80000001u, 0u, 2, 21, 0)

#else

// Other architectures are not compared: what runs there was compiled there.
#define MOK_INSTRUCTION_SETS(X)

#endif

namespace mok::host {

// In the order of the table, and one false behind them.
extern const bool kIsBuiltFor[];

}  // namespace mok::host
