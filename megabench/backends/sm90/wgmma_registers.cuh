// wgmma of bf16 or f16 with A in registers: d (+)= A B^T, B K-major in shared memory, fp32
// accumulators.
#pragma once

#include "wgmma.cuh"

// `a`: fragments of 64 x 16, `b`: descriptor of N x 16, `accumulate` 0 starts from zero.
template <int N, bool F16 = false>
DEVICE void wgmma_from_registers(float (&d)[N / 2], const u32 (&a)[4], u64 b, int accumulate);

// The accumulators as operands, and their names in the instruction.
#define OPERANDS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OPERANDS_8(i) OPERANDS_4(i), OPERANDS_4(i + 4)
#define OPERANDS_16(i) OPERANDS_8(i), OPERANDS_8(i + 8)
#define OPERANDS_32(i) OPERANDS_16(i), OPERANDS_16(i + 16)
#define OPERANDS_64(i) OPERANDS_32(i), OPERANDS_32(i + 32)
#define OPERANDS_128(i) OPERANDS_64(i), OPERANDS_64(i + 64)
#define NAMES_8 \
  "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", " \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32 NAMES_16 ", " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64 NAMES_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
  "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_128 NAMES_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, " \
  "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, " \
  "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, " \
  "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// `A`, `B` and `Accumulate` are the numbers of the operands that follow the accumulators.
#define WGMMA(N, Sums, Type, F16, A, B, Accumulate)                                           \
  template <>                                                                                 \
  DEVICE void wgmma_from_registers<N, F16>(float (&d)[Sums], const u32 (&a)[4], u64 b,        \
                                           int accumulate) {                                  \
    asm volatile("{\n.reg .pred acc;\nsetp.ne.b32 acc, " Accumulate ", 0;\n"                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." Type "." Type " "          \
                 "{" NAMES_##Sums "}, {" A "}, " B ", acc, 1, 1, 0;\n}"                       \
                 : OPERANDS_##Sums(0)                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));      \
  }
#define WGMMAS(N, Sums, ...) \
  WGMMA(N, Sums, "bf16", false, __VA_ARGS__) WGMMA(N, Sums, "f16", true, __VA_ARGS__)

WGMMAS(16, 8, "%8, %9, %10, %11", "%12", "%13")
WGMMAS(32, 16, "%16, %17, %18, %19", "%20", "%21")
WGMMAS(64, 32, "%32, %33, %34, %35", "%36", "%37")
WGMMAS(128, 64, "%64, %65, %66, %67", "%68", "%69")
WGMMAS(256, 128, "%128, %129, %130, %131", "%132", "%133")
